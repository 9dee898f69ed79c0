"""Loading checkpoints: bundled ones, folders, full Omni checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.processor.checkpoint import (
    BUNDLED,
    load_model,
    load_processor,
    load_prompting,
    placeholders_of,
    resolve,
)
from deployments.types import Modality
from tests.support.tiny_models import OMNI, qwen_vl


@pytest.fixture(scope="module")
def full_omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as the thinker of a full checkpoint that also has a talker."""
    from transformers import Qwen2_5OmniConfig

    folder = tmp_path_factory.mktemp("full-omni")
    for file in BUNDLED[OMNI].iterdir():
        if file.name not in {"config.json", "model.safetensors", "generation_config.json"}:
            (folder / file.name).write_bytes(file.read_bytes())
    thinker = json.loads((BUNDLED[OMNI] / "config.json").read_text())
    config = Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(BUNDLED[OMNI] / "model.safetensors")
    speaking = {"talker.codec_head.weight": torch.zeros(2)}
    full = {f"thinker.{name}": tensor for name, tensor in weights.items()} | speaking
    save_file(full, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_bundled_name_becomes_a_folder_and_other_names_stay() -> None:
    assert resolve("tiny-omni") == str(BUNDLED["tiny-omni"])
    assert resolve("Qwen/Qwen2.5-Omni-3B") == "Qwen/Qwen2.5-Omni-3B"
    assert resolve(qwen_vl()) == qwen_vl()


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"'\./nowhere'"):
        resolve("./nowhere")


def test_the_thinker_of_a_full_omni_checkpoint_is_loaded(full_omni: Path) -> None:
    part = load_model(str(full_omni), "cpu", "auto")
    whole = load_model(OMNI, "cpu", "auto")
    assert type(part) is type(whole)
    for (name, ours), (_, theirs) in zip(part.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name


def test_weights_in_several_files_are_loaded(tmp_path: Path) -> None:
    whole = load_model(OMNI, "cpu", "auto")
    whole.save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    parts = load_model(str(tmp_path), "cpu", "auto")
    for (name, ours), (_, theirs) in zip(parts.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_checkpoint_without_an_eos_token_gets_that_of_its_tokenizer(full_omni: Path) -> None:
    model = load_model(str(full_omni), "cpu", "auto")
    assert model.generation_config.eos_token_id == load_prompting(OMNI).tokenizer.eos_token_id is not None


@pytest.mark.parametrize("model", [lambda: OMNI, qwen_vl], ids=["omni", "qwen-vl"])
def test_a_template_from_a_file_replaces_that_of_the_checkpoint(model, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }} né", encoding="utf-8")
    prompting = load_prompting(model(), str(file))
    assert (
        prompting.chat_template == load_processor(model(), str(file)).chat_template == file.read_text("utf-8")
    )
    assert prompting.placeholders == load_prompting(model()).placeholders


def test_the_error_for_a_missing_template_says_how_to_give_one(tmp_path: Path) -> None:
    shutil.copytree(qwen_vl(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="name a file as chat_template"):
        load_prompting(str(tmp_path))
    file = tmp_path / "mine.jinja"
    file.write_text("hi")
    assert load_prompting(str(tmp_path), str(file)).chat_template == "hi"


def test_the_dtype_is_float32_on_a_cpu_unless_one_is_set() -> None:
    assert load_model(OMNI, "cpu", "auto").dtype == torch.float32
    assert load_model(OMNI, "cpu", "bfloat16").dtype == torch.bfloat16


def test_without_a_video_size_in_the_checkpoint_that_of_the_class_stays(tmp_path: Path) -> None:
    for file in BUNDLED[OMNI].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = json.loads((tmp_path / "processor_config.json").read_text())
    image_size = stored["image_processor"].pop("size")
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(stored["image_processor"] | {"size": image_size})
    )
    del stored["video_processor"]
    (tmp_path / "processor_config.json").write_text(json.dumps(stored))
    processor = load_processor(str(tmp_path))
    assert processor.videos_kwargs == type(processor).videos_kwargs
    omni: Any = load_processor(OMNI)  # its part for videos is not in the Protocol
    assert omni.videos_kwargs["size"] == omni.video_processor.size


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            lambda: OMNI,
            {Modality.IMAGE: "<|IMAGE|>", Modality.AUDIO: "<|AUDIO|>", Modality.VIDEO: "<|VIDEO|>"},
        ),
        (qwen_vl, {Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"}),
    ],
    ids=["omni", "qwen-vl"],
)
def test_placeholders_of_tokenizer_and_processor_agree(model, expected) -> None:  # type: ignore[no-untyped-def]
    assert load_prompting(model()).placeholders == expected
    assert placeholders_of(load_processor(model())) == expected
