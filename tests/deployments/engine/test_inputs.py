"""Embeddings from the model's own encoder give the same answer, token for token, as the media."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from transformers import Gemma3nConfig, Qwen3VLConfig

from deployments.engine.base import EngineItem
from deployments.engine.inputs import embedded, encode, hidden_size
from deployments.engine.transformers_engine import TransformersEngine
from deployments.errors import ServingError
from deployments.processor.checkpoint import load_model
from deployments.processor.placeholders import expand
from deployments.runtime.payload import unpack
from deployments.stages.embedding_loader import EmbeddingLoader, EmbeddingLoaderConfig
from deployments.types import (
    Arrays,
    Chat,
    EmbeddingSource,
    EmbedsForm,
    Media,
    Modality,
    Prompt,
    SamplingParams,
    embeds_name,
)
from tests.support.in_process import Direct
from tests.support.tiny_models import (
    MODELS,
    OMNI,
    audio,
    chat,
    engine_item,
    image,
    in_pieces,
    item_processor,
    tokenizer,
    video,
)

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
MODEL_ITEMS = {
    "omni": [image(1), audio(2), video(3), image(4, 64, 24), audio(5, 2.0), video(6, 8)],
    "qwen-vl": [image(1), video(2), image(3, 64, 24), video(4, 4, 48, 32)],
}


@pytest.fixture(scope="module", params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return load_model(MODELS[name](), "cpu", "auto")


@pytest.fixture
def engine(model: Any) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(model)
    yield engine
    engine.close()


async def answer(
    engine: TransformersEngine,
    prompt: Prompt,
    items: list[EngineItem],
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    return [
        token_id async for delta in engine.submit(prompt, items, sampling) for token_id in delta.token_ids
    ]


async def loaded(
    folder: str, modality: Modality | None, values: torch.Tensor, form: EmbedsForm, **numbers: Any
) -> EngineItem:
    """Passes a client's tensors through the stage."""
    sent = await in_pieces({embeds_name(modality): values, **numbers})
    source = EmbeddingSource(modality, sent, form, values.shape[1])
    features = await Direct(EmbeddingLoader(EmbeddingLoaderConfig())).load(source)
    return EngineItem(features, await unpack(features.payload))


async def as_embeds(
    folder: str, model: Any, item: EngineItem, dtype: torch.dtype = torch.float32
) -> EngineItem:
    """Returns what a client sends that runs the encoder itself."""
    modality = item.features.modality
    assert modality is not None
    with torch.inference_mode():
        values = encode(model, item).to(dtype)
    form = item_processor(folder).spec().embeds[modality]
    numbers = {key: torch.from_numpy(item.arrays[key]) for key in (form.grid, form.seconds) if key}
    return await loaded(folder, modality, values, form, **numbers)


def conversation(media: list[tuple[Media, Arrays]]) -> Chat:
    parts: list[str | Media] = []
    for item, _ in media:
        parts += [item, " and "]
    return chat("Here: ", *parts, "what is it?")


async def test_embeddings_answer_as_their_media(name: str, model: Any, engine: TransformersEngine) -> None:
    folder, media = MODELS[name](), MODEL_ITEMS[name]
    items = [engine_item(folder, *each) for each in media]
    embeds = [await as_embeds(folder, model, item) for item in items]
    prompt = tokenizer(folder).encode(conversation(media))
    mixed = [embeds[i] if i % 2 else item for i, item in enumerate(items)]
    with seen_by_language_model(model) as seen:
        expected = await answer(engine, prompt, items)
        by_media = seen.copy()
        for alike in (embeds, mixed):
            seen.clear()
            assert await answer(engine, prompt, alike) == expected
            assert seen.keys() == by_media.keys()
            for name, values in by_media.items():
                torch.testing.assert_close(seen[name], values, rtol=0, atol=1e-4)
    # The answer depends on the embeddings, and a request leaves no state behind.
    other = [await as_embeds(folder, model, engine_item(folder, *image(9))), *embeds[1:]]
    assert await answer(engine, prompt, other) != expected
    assert await answer(engine, prompt, items) == expected


@contextmanager
def seen_by_language_model(model: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Records the embeddings and positions of each step.

    A random model's answers hardly depend on positions, so comparing answers is not enough.
    """
    seen: dict[str, list[torch.Tensor]] = {}

    def note(_: object, args: object, kwargs: dict[str, Any]) -> None:
        for name in ("inputs_embeds", "position_ids"):
            seen.setdefault(name, []).append(kwargs[name].clone())

    hook = model.model.language_model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    hook.remove()


@pytest.mark.parametrize("alone", [0, 1, 2])
async def test_one_item_of_each_kind(alone: int) -> None:
    media = MODEL_ITEMS["omni"][alone]
    model = load_model(OMNI, "cpu", "auto")
    engine = TransformersEngine(model)
    item = engine_item(OMNI, *media)
    prompt = tokenizer(OMNI).encode(conversation([media]))
    expected = await answer(engine, prompt, [item])
    assert await answer(engine, prompt, [await as_embeds(OMNI, model, item)]) == expected
    engine.close()


async def test_embedded_text_answers_as_the_text(name: str, model: Any, engine: TransformersEngine) -> None:
    """Embedded text leaves the media next to it, and the splitting of the text around it, as they are."""
    folder = MODELS[name]()
    media, encoder = image(1), tokenizer(folder)
    item = engine_item(folder, *media)
    words = (
        FastTokenizer.from_str(encoder.spec.tokenizer_json)
        .encode("Look at this", add_special_tokens=False)
        .ids
    )
    parts = [
        {"type": "prompt"},
        {"type": "image"},
        {"type": "prompt"},
        {"type": "text", "text": "What is it?"},
    ]
    prompt = encoder.encode(Chat([{"role": "user", "content": parts}]))
    rows = model.get_input_embeddings()(torch.tensor(words)).detach()
    text = await loaded(folder, None, rows, EmbedsForm(encoder.spec.plain_token_id))
    as_ids = replace(text, features=replace(text.features, replacement=[(word, 1) for word in words]))
    token_ids, _ = expand(prompt, [as_ids.features, item.features, as_ids.features])
    assert len(token_ids) == len(prompt.token_ids) + 2 * (len(words) - 1) + item.features.num_tokens - 1
    plain = Prompt(token_ids_without(item, token_ids), [place_of(item, token_ids)])
    assert await answer(engine, prompt, [text, item, text]) == await answer(engine, plain, [item])


def place_of(item: EngineItem, token_ids: list[int]) -> tuple[Modality | None, int]:
    return item.features.modality, token_ids.index(item.features.replacement[0][0])


def token_ids_without(item: EngineItem, token_ids: list[int]) -> list[int]:
    """Returns the ids with one placeholder instead of the item's tokens."""
    _, start = place_of(item, token_ids)
    return token_ids[: start + 1] + token_ids[start + item.features.length :]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
async def test_embeddings_of_other_dtypes_are_accepted(
    dtype: torch.dtype, name: str, model: Any, engine: TransformersEngine
) -> None:
    folder, (media, arrays) = MODELS[name](), image(1)
    item = await as_embeds(folder, model, engine_item(folder, media, arrays), dtype)
    prompt = tokenizer(folder).encode(chat(media, "what is it?"))
    inputs = embedded(model, prompt, [item], frozenset(inspect.signature(model.forward).parameters))
    rows = inputs["inputs_embeds"]
    assert rows.dtype == model.dtype
    _, start = place_of(item, inputs["input_ids"][0].tolist())
    given = rows[0, start : start + item.features.num_tokens]
    exact = (await as_embeds(folder, model, engine_item(folder, media, arrays))).arrays["image_embeds"]
    torch.testing.assert_close(given, torch.tensor(exact).to(dtype).float(), rtol=0, atol=0)
    assert len(await answer(engine, prompt, [item])) == 24


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.finfo(np.float32).max, np.nan])
async def test_extreme_and_nan_embeddings_fail_at_most_their_request(
    temperature: float, value: float, name: str, model: Any, engine: TransformersEngine
) -> None:
    folder, (media, arrays) = MODELS[name](), image(1)
    item = await as_embeds(folder, model, engine_item(folder, media, arrays))
    filled = np.full_like(item.arrays["image_embeds"], value)
    prompt = tokenizer(folder).encode(chat(media, "what is it?"))
    sampling = SamplingParams(max_tokens=4, temperature=temperature, ignore_eos=True)
    spoilt = replace(item, arrays=item.arrays | {"image_embeds": filled})
    if np.isnan(value):
        with pytest.raises(ServingError, match="NaN or infinite logits"):
            await answer(engine, prompt, [spoilt], sampling)
    else:
        assert len(await answer(engine, prompt, [spoilt], sampling)) == 4
    assert len(await answer(engine, prompt, [item], sampling)) == 4


def test_models_that_need_more_than_embeddings_report_no_hidden_size(model: Any) -> None:
    assert hidden_size(model) == model.get_input_embeddings().embedding_dim
    deep = SimpleNamespace(config=Qwen3VLConfig())
    by_layer = SimpleNamespace(config=Gemma3nConfig())
    assert hidden_size(deep) is hidden_size(by_layer) is None
