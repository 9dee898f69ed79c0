"""Processor settings of a request, and their bounds."""

from __future__ import annotations

import pytest

from deployments.errors import InvalidRequest
from deployments.processor.settings import SETTINGS, as_kwargs, check_settings, settings_of
from deployments.types import Modality
from tests.support.tiny_families import FAMILIES
from tests.support.tiny_models import OMNI, processor, qwen_vl

CEILINGS = {"max_pixels": 4096, "min_pixels": 4096, "crop_to_patches": None}


def test_largest_values_come_from_the_checkpoint() -> None:
    assert settings_of(processor(qwen_vl()), Modality.IMAGE) == {"max_pixels": 4096, "min_pixels": 4096}


def test_the_size_of_videos_is_the_one_in_effect() -> None:
    own = processor(OMNI).videos_kwargs["size"]
    assert settings_of(processor(OMNI), Modality.VIDEO)["max_pixels"] == own["longest_edge"]
    kwargs = as_kwargs(processor(OMNI), Modality.VIDEO, {"max_pixels": 3000})
    assert kwargs == {"size": {"shortest_edge": own["shortest_edge"], "longest_edge": 3000}}


def test_audio_has_no_settings() -> None:
    assert settings_of(processor(OMNI), Modality.AUDIO) == {}


def test_every_setting_belongs_to_a_tested_family() -> None:
    found = [settings_of(processor(f.folder()), Modality(m)) for f in FAMILIES for m in f.modalities]
    assert {name for settings in found for name in settings} == SETTINGS.keys()


@pytest.mark.parametrize(
    "settings", [{}, {"max_pixels": 4096}, {"min_pixels": 9, "max_pixels": 9}, {"crop_to_patches": True}]
)
def test_settings_within_bounds_are_accepted(settings: dict[str, int | bool]) -> None:
    check_settings(settings, CEILINGS)


@pytest.mark.parametrize(
    ("settings", "param", "words"),
    [
        ({"max_pixels": 4097}, "max_pixels", "4097; the largest value of this model is 4096"),
        ({"dynamic_hd": 1}, "dynamic_hd", "Its settings: crop_to_patches, fps, max_pixels, min_pixels"),
        ({"min_pixels": 10, "max_pixels": 9}, "min_pixels", "greater than max_pixels"),
    ],
)
def test_unknown_settings_and_values_out_of_bounds_are_refused(
    settings: dict[str, int | bool], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_settings(settings, CEILINGS, others=["fps"])
    assert caught.value.param == f"mm_processor_kwargs.{param}"
