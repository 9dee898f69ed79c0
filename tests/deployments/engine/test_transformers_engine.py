"""The plain engine against `model.generate`, and requests that end early or fail."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from deployments.engine.base import Engine, EngineItem
from deployments.engine.batched_engine import BatchedEngine
from deployments.engine.config import EngineConfig
from deployments.engine.transformers_engine import TransformersEngine
from deployments.errors import Overloaded, ServingError, StageUnavailable
from deployments.processor.checkpoint import load_model
from deployments.types import Delta, Prompt, SamplingParams
from tests.support.tasks import started
from tests.support.tiny_models import (
    MODELS,
    audio,
    chat,
    engine_item,
    image,
    joint_call,
    qwen_vl,
    tokenizer,
    video,
)

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

GREEDY = SamplingParams(max_tokens=24)


class Gate:
    """Lets a model run a given number of steps."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.steps = 0
        self._permits = threading.Semaphore(0)
        self._hook = model.register_forward_pre_hook(self._step)

    def open(self, steps: int) -> None:
        self._permits.release(steps)

    def remove(self) -> None:
        self._hook.remove()
        self.open(1_000_000)

    def _step(self, *_: object) -> None:
        self._permits.acquire()
        self.steps += 1


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny Qwen2.5-VL, which never ends an answer by itself."""
    return load_model(qwen_vl(), "cpu", "auto")


@pytest.fixture
def engine(model: Any) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(model)
    yield engine
    engine.close()


@pytest.fixture
def gate(model: Any, engine: TransformersEngine) -> Iterator[Gate]:
    gate = Gate(model)
    yield gate
    gate.remove()


def text(*parts: str) -> Prompt:
    return tokenizer(qwen_vl()).encode(chat(*parts))


async def answer(
    engine: Engine,
    prompt: Prompt,
    sampling: SamplingParams = GREEDY,
    items: list[EngineItem] | None = None,
) -> tuple[list[int], str | None]:
    deltas = [delta async for delta in engine.submit(prompt, items or [], sampling)]
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return [token_id for delta in deltas for token_id in delta.token_ids], deltas[-1].finish_reason


@pytest.mark.parametrize("name", MODELS)
async def test_greedy_is_token_identical_with_generate(name: str) -> None:
    """Serves several requests in a row, since a request must leave no state in the model."""
    folder = MODELS[name]()
    model = load_model(folder, "cpu", "auto")
    requests = [
        (chat("a ", image(1)[0], " b ", video(2)[0]), [image(1), video(2)]),
        (chat("What can you do?"), []),
        (chat(image(3, 64, 24)[0], image(4)[0], "Which is larger?"), [image(3, 64, 24), image(4)]),
        (chat("What can you do?"), []),
    ]
    if name == "omni":
        requests.append((chat(audio(5)[0], video(6)[0], audio(7)[0]), [audio(5), video(6), audio(7)]))
    engine = TransformersEngine(model)
    try:
        for conversation, media in requests:
            inputs = joint_call(folder, conversation, media)
            expected = model.generate(**inputs, do_sample=False, max_new_tokens=24)[
                0, inputs["input_ids"].shape[1] :
            ]
            items = [engine_item(folder, *item) for item in media]
            prompt = tokenizer(folder).encode(conversation)
            token_ids, finish_reason = await answer(engine, prompt, GREEDY, items)
            ended = expected[-1] == model.generation_config.eos_token_id
            assert token_ids == expected.tolist()[: len(expected) - int(ended)]
            assert finish_reason == ("stop" if ended else "length")
    finally:
        engine.close()


async def test_eos_ends_with_stop_and_is_not_in_the_answer(model: Any, engine: TransformersEngine) -> None:
    token_ids, reason = await answer(engine, text("Count."))
    assert (len(token_ids), reason) == (24, "length")
    stopping = copy.copy(model)
    stopping.generation_config = copy.deepcopy(model.generation_config)
    stopping.generation_config.eos_token_id = [token_ids[10], 1023]
    other = TransformersEngine(stopping)
    first = token_ids.index(token_ids[10])
    assert await answer(other, text("Count.")) == (token_ids[:first], "stop")
    other.close()


async def test_the_context_bounds_the_answer(model: Any) -> None:
    prompt = text("Count.")
    engine = TransformersEngine(model, EngineConfig(max_model_len=len(prompt.token_ids) + 3))
    token_ids, reason = await answer(engine, prompt)
    assert (len(token_ids), reason) == (3, "length")
    engine.close()


async def test_one_seed_gives_one_text(engine: TransformersEngine) -> None:
    hot = SamplingParams(max_tokens=16, temperature=1.0, seed=7)
    first, _ = await answer(engine, text("Dream."), hot)
    other, _ = await answer(engine, text("Dream."), replace(hot, seed=8))
    unseeded = [await answer(engine, text("Dream."), replace(hot, seed=None)) for _ in range(2)]
    again, _ = await answer(engine, text("Dream."), hot)
    assert first == again
    assert first != other
    assert unseeded[0] != unseeded[1]


async def test_a_small_top_p_or_temperature_is_greedy(engine: TransformersEngine) -> None:
    greedy = await answer(engine, text("Dream."))
    narrow = SamplingParams(max_tokens=24, temperature=1.0, top_p=1e-6)
    assert await answer(engine, text("Dream."), narrow) == greedy
    for temperature in (1e-4, 1e-40):
        cold = SamplingParams(max_tokens=24, temperature=temperature)
        assert await answer(engine, text("Dream."), cold) == greedy


def test_defaults_are_the_checkpoints(model: Any) -> None:
    asking = copy.copy(model)
    asking.generation_config = GenerationConfig(do_sample=True, top_p=0.8, top_k=20, max_new_tokens=99)
    for config, expected in [
        (asking.generation_config, {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "max_tokens": 99}),
        (GenerationConfig(do_sample=True, temperature=0.7), {"temperature": 0.7}),
        (GenerationConfig(), {"temperature": 0.0}),
    ]:
        asking.generation_config = config
        engine = TransformersEngine(asking)
        assert engine.spec.default_sampling == expected
        engine.close()


async def test_closing_the_stream_stops_generation_within_a_token(
    engine: TransformersEngine, gate: Gate
) -> None:
    gate.open(3)
    async with aclosing(engine.submit(text("Count."), [], SamplingParams(400))) as deltas:
        seen = 0
        async for delta in deltas:
            seen += len(delta.token_ids)
            if seen == 3:
                break
    gate.open(400)
    await answer(engine, text("Next."), SamplingParams(5))
    assert gate.steps <= 3 + 1 + 5


async def test_a_cancelled_waiting_request_never_starts(engine: TransformersEngine, gate: Gate) -> None:
    running = await started(answer(engine, text("First."), SamplingParams(4)))
    waiting = await started(answer(engine, text("Second."), SamplingParams(400)))
    waiting.cancel()
    await asyncio.wait([waiting])
    gate.open(1000)
    await running
    await answer(engine, text("Third."), SamplingParams(4))
    assert gate.steps == 8


async def test_first_come_first_served(engine: TransformersEngine, gate: Gate) -> None:
    finished: list[int] = []

    async def one(i: int) -> None:
        await answer(engine, text(f"Number {i}."), SamplingParams(2))
        finished.append(i)

    tasks = [await started(one(i)) for i in range(5)]
    gate.open(10)
    await asyncio.gather(*tasks)
    assert finished == [0, 1, 2, 3, 4]


async def test_pending_tokens_arrive_in_one_delta(engine: TransformersEngine, gate: Gate) -> None:
    deltas = engine.submit(text("Count."), [], SamplingParams(6))
    first = await started(anext(deltas))
    gate.open(1)
    assert len((await first).token_ids) == 1
    gate.open(5)
    engine._inbox.put(None)  # the thread ends after this request
    engine._thread.join()  # this blocks the event loop, which cannot read meanwhile
    rest = [delta async for delta in deltas]
    assert [(len(delta.token_ids), delta.finish_reason) for delta in rest] == [(5, "length")]


async def test_several_answers_with_logprobs(engine: TransformersEngine) -> None:
    asked = SamplingParams(max_tokens=5, temperature=1.0, seed=3, n=2, top_logprobs=1, repetition_penalty=1.2)
    deltas = [delta async for delta in engine.submit(text("Dream."), [], asked)]
    answers = [[t for delta in deltas if delta.index == index for t in delta.token_ids] for index in range(2)]
    assert [len(tokens) for tokens in answers] == [5, 5]
    assert answers[0] != answers[1]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert (await answer(engine, text("Dream."), replace(asked, n=1)))[0] == answers[0]


async def test_an_ended_answer_stops_within_a_token(engine: TransformersEngine, gate: Gate) -> None:
    ended: set[int] = set()
    stream = engine.submit(text("Dream."), [], SamplingParams(400, n=2), ended)
    gate.open(1)
    first = await anext(stream)
    ended.add(first.index)
    gate.open(1)
    delta = await anext(stream)
    while not delta.finish_reason:
        delta = await anext(stream)
    assert (delta.index, delta.finish_reason) == (0, "stop")
    ended.add(1)
    gate.open(5)
    *_, last = [delta async for delta in stream]
    assert (last.index, last.finish_reason) == (1, "stop")
    assert gate.steps <= 4


async def test_both_engines_draw_the_same_tokens(model: Any, engine: TransformersEngine) -> None:
    asked = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=3, presence_penalty=0.5)
    batched = BatchedEngine(model)
    assert await answer(batched, text("Dream."), asked) == await answer(engine, text("Dream."), asked)
    batched.close()


async def test_a_full_queue_rejects_requests(model: Any) -> None:
    gate = Gate(model)
    engine = TransformersEngine(model, EngineConfig(max_waiting_requests=1))
    tasks = [await started(answer(engine, text("Count."), SamplingParams(2))) for _ in range(2)]
    with pytest.raises(Overloaded):
        await answer(engine, text("Count."))
    gate.remove()
    await asyncio.gather(*tasks)
    engine.close()


async def test_the_first_delta_has_the_times(engine: TransformersEngine) -> None:
    deltas: list[Delta] = [delta async for delta in engine.submit(text("Count."), [], GREEDY)]
    assert deltas[0].prefill_ms > 0
    assert deltas[0].queue_ms > 0
    assert all(delta.queue_ms == delta.prefill_ms == 0 for delta in deltas[1:])


async def test_a_request_that_fails_in_the_model_fails_alone(engine: TransformersEngine) -> None:
    media, arrays = image(1)
    prompt = tokenizer(qwen_vl()).encode(chat(media))
    good = engine_item(qwen_vl(), media, arrays)
    bad = replace(good, arrays=good.arrays | {"pixel_values": good.arrays["pixel_values"][:, :6]})
    alone = await answer(engine, prompt, GREEDY, [good])
    results = await asyncio.gather(
        answer(engine, prompt, GREEDY, [good]),
        answer(engine, prompt, GREEDY, [bad]),
        answer(engine, prompt, GREEDY, [good]),
        return_exceptions=True,
    )
    assert results[0] == results[2] == alone
    assert isinstance(results[1], ServingError)
    assert str(results[1]) == "The model failed on this request."
    engine.check_health()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_engine_fails_open_requests_and_health(
    engine: TransformersEngine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.check_health()
    running = engine.submit(text("First."), [], SamplingParams(2))
    waiting = asyncio.create_task(answer(engine, text("Second.")))
    gate.open(1)
    await anext(running)
    monkeypatch.setattr(engine, "_serve", _die)
    gate.open(1)
    assert [delta.finish_reason async for delta in running][-1] == "length"
    with pytest.raises(StageUnavailable):
        await waiting
    engine._thread.join()
    with pytest.raises(StageUnavailable):
        engine.check_health()
    with pytest.raises(StageUnavailable):
        await answer(engine, text("Third."))


def _die(_: object) -> None:
    raise SystemExit


async def test_closing_the_engine_fails_open_requests(model: Any) -> None:
    gate = Gate(model)
    engine = TransformersEngine(model)
    tasks = [await started(answer(engine, text("First."), SamplingParams(400))) for _ in range(2)]
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    gate.remove()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await closing
    assert all(isinstance(result, StageUnavailable) for result in results)


async def test_read_only_features_are_accepted(engine: TransformersEngine) -> None:
    media, arrays = image(1)
    item = engine_item(qwen_vl(), media, arrays)
    for array in item.arrays.values():
        array.flags.writeable = False
    before = {name: array.copy() for name, array in item.arrays.items()}
    await answer(engine, tokenizer(qwen_vl()).encode(chat(media)), GREEDY, [item])
    for name, array in item.arrays.items():
        np.testing.assert_array_equal(array, before[name])
