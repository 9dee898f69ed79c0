"""The shipped model: small, complete without a network, and right about media that it has never seen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile as sf
import torch
from PIL import Image

from scripts.eval_tiny_omni import MODEL, Model, Score, unseen_draw
from scripts.make_samples import FOLDER, LABELS
from scripts.tiny_omni.conversations import GREETING, IDENTITY
from scripts.tiny_omni.features import sample_indices
from scripts.tiny_omni.language_model import SUITES
from tests.support.synthetic_media import Clip


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for matrices this small
    yield Model(MODEL)
    torch.set_num_threads(threads)


def read(path: Path) -> tuple[str, Any]:
    """A sample file as (modality, data)."""
    if path.suffix in (".png", ".jpg"):
        return "image", np.array(Image.open(path).convert("RGB"))
    if path.suffix in (".wav", ".mp3"):
        return "audio", sf.read(path, dtype="float32")[0]
    with av.open(path) as container:
        fps = float(container.streams.video[0].average_rate or 0)
        return "video", Clip(np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)]), fps)


def test_the_folder_is_small_and_holds_no_machine_paths() -> None:
    files = list(MODEL.iterdir())
    assert sum(file.stat().st_size for file in files) < 10_000_000
    for file in files:
        if file.suffix == ".json":
            assert "_name_or_path" not in json.loads(file.read_text())


@pytest.mark.parametrize(("name", "label"), LABELS.items())
def test_a_sample_gets_its_label(model: Model, name: str, label: str) -> None:
    modality, data = read(FOLDER / name)
    messages = [{"role": "user", "content": [{"type": modality}, {"type": "text", "text": "What is this?"}]}]
    assert model.answer(messages, [(modality, data)]) == f"{modality} 1: {label}"  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["one image", "one audio", "one video", "four mixed items", "text alone"])
def test_unseen_prompts_are_answered_right(model: Model, name: str) -> None:
    rng, draw, score = np.random.default_rng(11), unseen_draw(31), Score()
    for _ in range(6):
        talk = SUITES[name](rng, draw)
        score.add(model.answer(talk.messages[:-1], talk.items), talk.answer)
    assert score.right >= 5, score.misses


def test_text_alone_is_answered_without_items(model: Model) -> None:
    assert model.answer([{"role": "user", "content": "Hello!"}]) == GREETING
    assert model.answer([{"role": "user", "content": "What is the tallest mountain?"}]) == IDENTITY


@pytest.mark.parametrize("text", ["", "plain", "日本語 🙂 \x00\u200d\tÅ\r\n", "<b>&amp;</b> {}%", "a" * 300])
def test_any_text_survives_the_tokenizer(model: Model, text: str) -> None:
    tokenizer = model.processor.tokenizer
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_string_and_a_text_part_render_alike(model: Model) -> None:
    plain = [{"role": "user", "content": "hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    render = model.processor.apply_chat_template
    assert render(plain, tokenize=False) == render(parts, tokenize=False)


def test_every_item_is_one_placeholder_in_its_place(model: Model) -> None:
    content = [{"type": kind} for kind in ("image", "audio", "image", "video")]
    content.insert(2, {"type": "text", "text": "between"})
    text = model.processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    order = ["image 1:", "<|IMAGE|>", "audio 1:", "<|AUDIO|>", "between", "image 2:", "video 1:", "<|VIDEO|>"]
    places = [text.index(piece) for piece in order]
    assert places == sorted(places)
    assert [text.count(mark) for mark in ("<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>")] == [2, 1, 1]


def test_frames_are_sampled_evenly_from_first_to_last() -> None:
    assert sample_indices(50) == [0, 7, 14, 21, 28, 35, 42, 49]
    assert sample_indices(3) == [0, 1, 2]
