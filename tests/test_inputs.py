"""Embeddings that the model's own encoder made give, token for token, the answer that the media give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import (
    MODELS,
    OMNI,
    as_sent,
    audio,
    chat,
    engine_item,
    image,
    item_processor,
    tokenizer,
    video,
)

from deployments.checkpoint import load_model
from deployments.embeddings import EmbeddingLoader, EmbeddingsConfig
from deployments.engine.base import EngineItem
from deployments.engine.inputs import encode
from deployments.engine.transformers_engine import TransformersEngine
from deployments.payload import pack, unpack
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
    """Through the stage, as the client's tensors go."""
    sent: Arrays = {embeds_name(modality): as_sent(values), **numbers}
    source = EmbeddingSource(modality, await pack(sent), form, values.shape[1])
    features = await EmbeddingLoader(EmbeddingsConfig()).load(source, timeout_s=30)
    return EngineItem(features, await unpack(features.payload))


async def as_embeds(folder: str, model: Any, item: EngineItem) -> EngineItem:
    """What a client sends that ran the encoder itself."""
    modality = item.features.modality
    assert modality is not None
    with torch.inference_mode():
        values = encode(model, item).clone()
    form = item_processor(folder).spec.embeds[modality]
    numbers = {key: as_sent(torch.from_numpy(item.arrays[key])) for key in (form.grid, form.seconds) if key}
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
    expected = await answer(engine, prompt, items)
    assert await answer(engine, prompt, embeds) == expected
    mixed = [embeds[i] if i % 2 else item for i, item in enumerate(items)]
    assert await answer(engine, prompt, mixed) == expected
    # The answer depends on what was embedded, and one request leaves nothing to the next.
    other = [await as_embeds(folder, model, engine_item(folder, *image(9))), *embeds[1:]]
    assert await answer(engine, prompt, other) != expected
    assert await answer(engine, prompt, items) == expected


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
