"""The model stage, from payloads to deltas, with the stages before it."""

from __future__ import annotations

import asyncio

import pytest

from deployments.errors import PromptTooLong, StageUnavailable
from deployments.stages.mm_preprocessor import MMPreprocessor, MMPreprocessorConfig
from deployments.stages.model import Model, ModelConfig
from deployments.types import CallHeader, Delta, MMFeatures, Prompt, SamplingParams
from tests.support.in_process import Direct
from tests.support.tiny_models import DECODER, OMNI, audio, chat, image, tokenizer, video

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(ModelConfig(device="cpu"))


async def prepared() -> tuple[Prompt, list[MMFeatures]]:
    preprocessor = Direct(MMPreprocessor(MMPreprocessorConfig(), DECODER))
    media = [image(1)[0], audio(2)[0], video(3)[0]]
    features = await asyncio.gather(*(preprocessor.process_one(item) for item in media))
    return tokenizer(OMNI).encode(chat("What is this?", *media)), list(features)


async def test_payloads_in_deltas_out(model: Model) -> None:
    prompt, features = await prepared()
    deltas: list[Delta] = [
        delta async for delta in model.generate(CallHeader(), prompt, features, SamplingParams(12))
    ]
    assert 0 < sum(len(delta.token_ids) for delta in deltas) <= 12
    assert deltas[-1].finish_reason in {"stop", "length"}


async def test_a_prompt_longer_than_the_context() -> None:
    prompt, features = await prepared()
    length = len(prompt.token_ids) + sum(item.length - 1 for item in features)
    model = Model(ModelConfig(device="cpu", max_model_len=length))
    with pytest.raises(PromptTooLong, match=f"has {length} tokens, and the model's context of {length}"):
        await anext(model.generate(CallHeader(), prompt, features, SamplingParams(12)))


async def test_description(model: Model) -> None:
    spec = await model.describe()
    assert (spec.max_model_len, spec.device, spec.dtype) == (4096, "cpu", "float32")
    assert spec.default_sampling["temperature"] == 0.0
    assert (await Model(ModelConfig(device="cpu", max_model_len=100)).describe()).max_model_len == 100


async def test_health_is_that_of_the_engine() -> None:
    model = Model(ModelConfig(device="cpu"))
    model.check_health()
    model._engine.close()
    with pytest.raises(StageUnavailable):
        model.check_health()
