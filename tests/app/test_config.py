from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from app.config import AppConfig
from app.graph import DEPLOYMENTS, build
from deployments.stages.base import StageConfig
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("args", "place"),
    [
        ({"modle": "tiny-omni"}, ("modle",)),
        ({"media_loader": {"thread": 2}}, ("media_loader", "thread")),
        ({"engine": {"dtyp": "auto"}}, ("engine", "dtyp")),
    ],
)
def test_a_misspelt_key_is_refused_by_name(args: dict[str, object], place: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        AppConfig.model_validate(args)
    assert caught.value.errors()[0]["loc"] == place


def test_all_stages_get_the_one_model(tmp_path: Path) -> None:
    config = AppConfig(model=str(tmp_path))
    assert config.tokenizer.model == config.mm_preprocessor.model == config.engine.model == str(tmp_path)
    assert config.served_model_name == tmp_path.name


def test_a_relative_folder_means_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    assert AppConfig(model="mine").engine.model == str(tmp_path / "mine")


def test_stages_that_write_prompts_get_the_one_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}")
    config = AppConfig(chat_template=str(file))
    assert config.tokenizer.chat_template == config.mm_preprocessor.chat_template == str(file)
    with pytest.raises(ValidationError, match=r"there is no file '.*other\.jinja'"):
        AppConfig(chat_template=str(tmp_path / "other.jinja"))


@pytest.mark.parametrize(
    ("model", "name"), [("tiny-omni", "tiny-omni"), ("Qwen/Qwen2.5-Omni-3B", "Qwen2.5-Omni-3B")]
)
def test_clients_call_the_model_by_its_last_part(model: str, name: str) -> None:
    assert AppConfig(model=model).api.model_name == name


def test_the_shipped_config_is_valid_and_names_the_six_stages() -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    (application,) = config["applications"]
    AppConfig.model_validate(application["args"])
    assert application["import_path"] == f"{build.__module__}:{build.__name__}"
    assert {d["name"] for d in application["deployments"]} == {
        "Ingress",
        "Tokenizer",
        "MediaLoader",
        "EmbeddingLoader",
        "MMPreprocessor",
        "Model",
    }


def test_serve_can_see_which_class_validates_the_arguments() -> None:
    """Serve reads the annotation as it is; a string would let every key pass."""
    assert build.__annotations__["args"] is AppConfig


def test_every_stage_has_its_section_and_gets_the_collector() -> None:
    config = AppConfig(otlp_endpoint="http://localhost:4318")
    sections = {name: value for name, value in config if isinstance(value, StageConfig)}
    names = {"".join(word.title() for word in name.split("_")) for name in sections} - {"Engine"}
    assert {name.lower() for name in names} | {"model", "ingress"} == {d.lower() for d in DEPLOYMENTS}
    assert {section.otlp_endpoint for section in sections.values()} == {"http://localhost:4318"}
