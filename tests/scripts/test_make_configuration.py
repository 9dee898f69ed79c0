"""docs/configuration.md."""

from __future__ import annotations

import pytest

from scripts.make_configuration import DOCS, Setting, document, settings


def test_the_page_is_up_to_date() -> None:
    assert DOCS.read_text(encoding="utf-8") == document(), "run python -m scripts.make_configuration --write"


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_every_setting_has_a_default_and_a_description(setting: Setting) -> None:
    assert setting.default
    assert setting.description.endswith(".")


def test_sections_have_no_settings_of_the_top_level() -> None:
    names = [setting.name for setting in settings()]
    assert "model" in names
    assert not [name for name in names if name.endswith((".model", ".chat_template", ".otlp_endpoint"))]
    assert "media_io_kwargs.video.fps" in names
