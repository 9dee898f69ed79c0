"""The batched engine against `model.generate` in any batch, and requests that are cancelled or fail."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from deployments.engine.base import EngineItem
from deployments.engine.batched_engine import BatchedEngine
from deployments.engine.batching_support import why_not_batched
from deployments.engine.config import EngineConfig
from deployments.engine.paged_cache import bytes_per_token
from deployments.errors import Overloaded, ServingError, StageUnavailable
from deployments.processor.checkpoint import load_model
from deployments.types import Delta, Prompt, SamplingParams
from tests.support import batched_families, tiny_families, tiny_models
from tests.support.batched_families import Family, family
from tests.support.family_models import WITH_MODELS, tiny_model
from tests.support.tasks import started

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of GLM-4V's processor
]

torch.set_num_threads(1)  # as in the model's stage; for such small models more are only slower

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=24)
NOT_BATCHED = {"Gemma 3", "Gemma 4", "Mistral 3 (Pixtral)", "Phi-4-multimodal", "Qwen3-VL"}
FAMILIES = [*batched_families.NAMES, "omni"]


class Gate:
    """Lets an engine take a given number of steps."""

    def __init__(self, engine: BatchedEngine) -> None:
        self._permits, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._step = engine.step
        self._deliver = engine._deliver
        engine.step = self._gated  # type: ignore[method-assign]

    async def steps(self, n: int) -> None:
        """Returns when the steps are done and delivered. The engine must have work."""
        for _ in range(n):
            self._permits.release()
            await asyncio.to_thread(self._done.acquire)
        await asyncio.sleep(0)  # one turn of the loop, in which the readers take the deltas

    def open(self) -> None:
        self._permits.release(1_000_000)

    def _gated(self) -> None:
        self._permits.acquire()
        self._step()
        self._deliver()
        self._done.release()


@contextmanager
def running(model: Any, config: EngineConfig = EngineConfig()) -> Iterator[BatchedEngine]:  # noqa: B008
    engine = BatchedEngine(model, config)
    try:
        yield engine
    finally:
        engine.close()


@asynccontextmanager
async def gated(
    model: Any,
    config: EngineConfig = EngineConfig(),  # noqa: B008
) -> AsyncIterator[tuple[BatchedEngine, Gate]]:
    engine = BatchedEngine(model, config)
    gate = Gate(engine)
    try:
        yield engine, gate
    finally:
        gate.open()
        await asyncio.to_thread(engine.close)


async def deltas(
    engine: BatchedEngine, prompt: Prompt, items: list[EngineItem], sampling: SamplingParams
) -> list[Delta]:
    return [delta async for delta in engine.submit(prompt, items, sampling)]


async def answer(
    engine: BatchedEngine,
    prompt: Prompt,
    items: list[EngineItem] | None = None,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    return [
        token for delta in await deltas(engine, prompt, items or [], sampling) for token in delta.token_ids
    ]


def text(seed: int, length: int = 12) -> Prompt:
    return batched_families.prompt(seed, [], length)


@cache
def omni() -> Family:
    media = [tiny_models.image, tiny_models.audio, tiny_models.video]
    return Family(
        load_model(tiny_models.OMNI, "cpu", "auto"),
        lambda seed: tiny_models.engine_item(tiny_models.OMNI, *media[seed % 3](seed)),
    )


def named(name: str) -> Family:
    return omni() if name == "omni" else family(name)


@cache
def requests(name: str) -> list[tuple[Prompt, list[EngineItem], list[int]]]:
    """Returns sixteen requests with up to two items each, and the answers of `generate`."""
    chosen = named(name)
    return [
        (*request, generated(chosen, *request, max_new_tokens=LONG.max_tokens))
        for request in (request_of(name, seed) for seed in range(16))
    ]


def request_of(name: str, seed: int) -> tuple[Prompt, list[EngineItem]]:
    chosen = named(name)
    items = [chosen.item(3 * seed + k) for k in range(0 if name == "text" else seed % 3)]
    return batched_families.prompt(seed, items, 8 + 3 * seed), items


@torch.inference_mode()
def generated(chosen: Family, prompt: Prompt, items: list[EngineItem], **settings: Any) -> list[int]:
    inputs = chosen.inputs(prompt, items)
    settings = {"max_new_tokens": GREEDY.max_tokens, "eos_token_id": [10**6], "do_sample": False} | settings
    answer: list[int] = chosen.model.generate(**inputs, **settings)[
        0, inputs["input_ids"].shape[1] :
    ].tolist()
    return answer


@pytest.mark.parametrize("name", FAMILIES)
async def test_greedy_is_that_of_generate_alone(name: str) -> None:
    with running(named(name).model) as engine:
        for prompt, items, expected in requests(name):
            assert await answer(engine, prompt, items, LONG) == expected


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("limits", ["wide", "chunks", "small cache"])
async def test_greedy_is_that_of_generate_among_others(name: str, limits: str) -> None:
    """Sends sixteen requests at random steps, twice: the second time most of it is cached."""
    model = named(name).model
    chosen = {
        "wide": EngineConfig(),
        "chunks": EngineConfig(max_num_batched_tokens=16),
        "small cache": EngineConfig(
            kv_cache_bytes=bytes_per_token(model) * 16 * 10, max_waiting_requests=100
        ),
    }[limits]
    rng = np.random.default_rng(0)
    async with gated(model, chosen) as (engine, gate):
        for _ in range(2):
            tasks = []
            for prompt, items, _ in requests(name):
                tasks.append(await started(answer(engine, prompt, items, LONG)))
                await gate.steps(int(rng.integers(0, 4)))
            gate.open()
            answers = await asyncio.gather(*tasks)
            assert answers == [expected for *_, expected in requests(name)]
        stats = engine.stats()
        assert (stats.preemptions > 0) == (limits == "small cache")
        assert (stats.prefix_hit_tokens > 0) == (limits != "small cache")
        assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)


@pytest.mark.parametrize(
    "chosen", [family for family in WITH_MODELS if family.name not in NOT_BATCHED], ids=str
)
async def test_whole_conversations_through_the_processors(chosen: tiny_families.Family) -> None:
    """Compares several items of each modality in six messages with one call of processor and `generate`."""
    folder, items = chosen.folder(), tiny_families.samples(chosen)
    if chosen.name == "GLM-4V":  # its model takes images or videos in one request
        items = [item for item in items if item[0].modality == "image"]
    model = copy.deepcopy(tiny_model(chosen))
    for parameter in model.get_decoder().parameters():
        parameter.data *= 4 if parameter.ndim > 1 else 1  # else it would repeat one token
    conversation = tiny_families.conversation(items)
    inputs = tiny_models.joint_call(folder, conversation, items)
    with torch.inference_mode():
        expected = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=[10**6],
            output_logits=True,
            return_dict_in_generate=True,
        )
    reported = [float(row.log_softmax(-1).max()) for row in expected.logits]
    ready = tiny_models.engine_items_of(folder, items)
    prompt = tiny_models.tokenizer(folder).encode(conversation, [item.features.affixes for item in ready])
    assert why_not_batched(model) is None
    with running(model, EngineConfig(max_num_batched_tokens=64)) as engine:
        parts = await deltas(engine, prompt, ready, replace(GREEDY, top_logprobs=0))
    tokens = [token for delta in parts for token in delta.token_ids]
    assert tokens == expected.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    assert [each.logprob for delta in parts for each in delta.logprobs] == pytest.approx(reported, abs=1e-3)


async def test_a_prefix_is_shared_as_far_as_text_and_media_are_the_same() -> None:
    chosen = omni()
    one, other = (tiny_models.engine_item(tiny_models.OMNI, *tiny_models.image(seed)) for seed in (1, 2))
    prompt = Prompt([5 * i + 20 for i in range(40)], [])
    prompt.token_ids[20] = 3
    prompt = replace(prompt, placeholders=[(one.features.modality, 20)])
    with running(chosen.model) as engine:
        for item, cached in ((one, 0), (one, 48), (other, 16), (other, 48)):
            first, *_ = await deltas(engine, prompt, [item], GREEDY)
            assert first.cached_tokens == cached
            assert await answer(engine, prompt, [item]) == generated(chosen, prompt, [item])
        stats = engine.stats()
        assert stats.encoder_misses == 2
        assert 0 < stats.encoder_bytes <= 2 * one.features.length * 128 * 4


async def test_the_encoder_cache_is_bounded_and_spares_the_encoder() -> None:
    chosen = family("llava")
    items = [chosen.item(seed) for seed in range(3)]
    size = items[0].features.length * 64 * 4
    with running(chosen.model, EngineConfig(encoder_cache_bytes=2 * size)) as engine:
        for seed, item in enumerate([items[0], items[1], items[0], items[2], items[1]]):
            await answer(engine, batched_families.prompt(seed, [item]), [item])
        stats = engine.stats()
        assert (stats.encoder_hits, stats.encoder_misses) == (1, 4)
        assert stats.encoder_bytes == 2 * size


def encoded(chosen: Family, item: EngineItem) -> EngineItem:
    """Returns a LLaVA item as embeddings, as a client may send them."""
    with torch.no_grad():
        pixels = torch.from_numpy(item.arrays["pixel_values"])
        (embeds,) = chosen.model.model.get_image_features(pixels, return_dict=True).pooler_output
    shapes = {"image_embeds": (tuple(embeds.shape), "float32")}
    return replace(
        item, arrays={"image_embeds": embeds.numpy()}, features=replace(item.features, shapes=shapes)
    )


async def test_sent_embeddings_replace_an_item() -> None:
    chosen = family("llava")
    item = chosen.item(1)
    prompt = batched_families.prompt(1, [item])
    with running(chosen.model) as engine:
        assert await answer(engine, prompt, [encoded(chosen, item)]) == generated(chosen, prompt, [item])


async def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    model = family("text").model
    hot = [replace(GREEDY, temperature=0.9, top_p=0.9, top_k=50, seed=seed) for seed in range(12)]
    with running(model) as engine:
        alone = [await answer(engine, text(seed), [], sampling) for seed, sampling in enumerate(hot)]
        again = await asyncio.gather(*(answer(engine, text(s), [], each) for s, each in enumerate(hot)))
    assert again == alone
    assert len({tuple(each) for each in alone}) == 12


async def test_answers_to_one_request_share_its_prefill() -> None:
    model = family("text").model
    several = replace(GREEDY, temperature=1.0, seed=3, n=3)
    with running(model) as engine:
        parts = await deltas(engine, text(1, 100), [], several)
        computed = engine.stats().steps
        one = await answer(engine, text(1, 100), [], replace(several, n=1))
    answers = answers_of(parts)
    assert [len(each) for each in answers] == [12] * 3
    assert answers[0] == one
    assert len({tuple(each) for each in answers}) == 3
    assert sorted(d.index for d in parts if d.finish_reason == "length") == [0, 1, 2]
    assert max(d.cached_tokens for d in parts) == 0
    assert computed <= 12 + 2


async def test_logprobs_are_the_models_own() -> None:
    chosen = family("text")
    asked = replace(GREEDY, max_tokens=4, temperature=2.0, seed=1, top_logprobs=3, logit_bias={7: 3.0})
    with running(chosen.model) as engine:
        parts = await deltas(engine, text(1), [], asked)
    tokens = [token for delta in parts for token in delta.token_ids]
    reported = [each for delta in parts for each in delta.logprobs]
    with torch.no_grad():
        whole = torch.tensor([text(1).token_ids + tokens])
        expected = chosen.model(input_ids=whole).logits[0, 11:-1].log_softmax(-1)
    for row, token, each in zip(expected, tokens, reported, strict=True):
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [i for i, _ in each.top] == row.topk(3).indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


async def test_repetition_penalty_is_that_of_generate() -> None:
    chosen = family("qwen2_vl")
    items = [chosen.item(1)]
    prompt = batched_families.prompt(1, items)
    expected = generated(chosen, prompt, items, repetition_penalty=1.3, max_new_tokens=80)
    assert expected != generated(chosen, prompt, items, max_new_tokens=80)
    penalized = replace(GREEDY, repetition_penalty=1.3, max_tokens=80)
    with running(chosen.model) as engine:
        assert await answer(engine, prompt, items, penalized) == expected


async def test_ends() -> None:
    model = family("text").model
    with running(model) as engine:
        tokens = await answer(engine, text(1))
        stop = tokens[5]
        first = tokens.index(stop)
        stopping = replace(GREEDY, stop_token_ids=(stop,))
        *_, last = parts = await deltas(engine, text(1), [], stopping)
        assert [t for d in parts for t in d.token_ids] == tokens[:first]
        assert last.finish_reason == "stop"
        later = await answer(engine, text(1), [], replace(stopping, min_tokens=8))
        assert later[:first] == tokens[:first]
        assert stop not in later[:8]
        assert len(later) >= 8


async def test_the_context_bounds_the_answer() -> None:
    with running(family("text").model, EngineConfig(max_model_len=15)) as engine:
        assert engine.spec.max_model_len == 15
        *_, last = parts = await deltas(engine, text(1), [], GREEDY)
        assert (sum(len(d.token_ids) for d in parts), last.finish_reason) == (3, "length")


async def test_a_cancelled_request_frees_its_slot_and_memory_within_a_step() -> None:
    model = family("text").model
    long = replace(GREEDY, max_tokens=60)
    with running(model) as engine:
        expected = [await answer(engine, text(seed), [], long) for seed in range(16)]
    async with gated(model) as (engine, gate):
        tasks = [await started(answer(engine, text(seed), [], long)) for seed in range(16)]
        await gate.steps(10)
        assert engine.stats().running == 16
        used = engine.stats().kv_tokens_used
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks[::2])
        await gate.steps(1)
        assert engine.stats().running == 8
        assert engine.stats().kv_tokens_used == used // 2
        gate.open()
        assert await asyncio.gather(*tasks[1::2]) == expected[1::2]
        assert engine.stats().kv_tokens_used == 0


async def test_an_ended_answer_frees_its_slot_within_a_step() -> None:
    model = family("text").model
    several = replace(GREEDY, temperature=1.0, seed=3, n=3, max_tokens=40)
    with running(model) as engine:
        expected = answers_of(await deltas(engine, text(1), [], several))
    async with gated(model) as (engine, gate):
        received: list[Delta] = []
        ended: set[int] = set()

        async def read() -> None:
            received.extend([delta async for delta in engine.submit(text(1), [], several, ended)])

        reading = await started(read())
        await gate.steps(10)
        used, generated = engine.stats().kv_tokens_used, engine.stats().generated_tokens
        ended.add(1)
        await gate.steps(1)
        assert engine.stats().running == 2
        assert engine.stats().generated_tokens == generated + 2
        assert engine.stats().kv_tokens_used < used
        gate.open()
        await reading
    answers = answers_of(received)
    assert [answers[0], answers[2]] == [expected[0], expected[2]]
    assert answers[1] == expected[1][: len(answers[1])]
    assert sorted((d.index, d.finish_reason) for d in received if d.finish_reason) == [
        (0, "length"),
        (1, "stop"),
        (2, "length"),
    ]


def answers_of(received: list[Delta]) -> list[list[int]]:
    indices = sorted({delta.index for delta in received})
    return [[t for delta in received if delta.index == index for t in delta.token_ids] for index in indices]


async def test_a_stream_that_is_closed_ends_its_request() -> None:
    async with gated(family("text").model) as (engine, gate):
        async with aclosing(engine.submit(text(1), [], replace(GREEDY, max_tokens=400))) as stream:
            first = await started(anext(stream))
            await gate.steps(1)
            await first
        other = await started(answer(engine, text(2)))
        await gate.steps(2)
        assert engine.stats().running == 1
        gate.open()
        await other


async def test_a_long_prompt_does_not_stall_the_others() -> None:
    """Each of eight streams gets a token in every step that prefills a part of the longest prompt."""
    async with gated(family("text").model, EngineConfig(max_num_batched_tokens=32)) as (engine, gate):
        streams = [engine.submit(text(seed), [], replace(GREEDY, max_tokens=100)) for seed in range(8)]
        firsts = [await started(anext(stream)) for stream in streams]
        await gate.steps(4)
        await asyncio.gather(*firsts)
        long = await started(answer(engine, text(9, 480), [], replace(GREEDY, max_tokens=2)))
        await gate.steps(1)  # the prefill has begun
        for stream in streams:
            await anext(stream)
        for _ in range(480 // 32):
            await gate.steps(1)
            received = await asyncio.gather(*(anext(stream) for stream in streams))
            assert [len(delta.token_ids) for delta in received] == [1] * 8
        gate.open()
        assert len(await long) == 2
        for stream in streams:
            await stream.aclose()


async def test_first_come_first_served() -> None:
    begun: list[int] = []

    async def one(seed: int) -> None:
        async for _ in engine.submit(text(seed, 40 - 4 * seed), [], GREEDY):
            if seed not in begun:
                begun.append(seed)

    with running(family("text").model, EngineConfig(max_num_seqs=1)) as engine:
        await asyncio.gather(*(one(seed) for seed in range(6)))
    assert begun == list(range(6))


async def test_a_full_queue_rejects_requests() -> None:
    async with gated(family("text").model, EngineConfig(max_num_seqs=1, max_waiting_requests=2)) as (
        engine,
        gate,
    ):
        tasks = [await started(answer(engine, text(seed))) for seed in range(3)]
        with pytest.raises(Overloaded, match="Try again later"):
            await answer(engine, text(3))
        gate.open()
        assert [len(each) for each in await asyncio.gather(*tasks)] == [12] * 3
        assert len(await answer(engine, text(3))) == 12


class HeldEncoder:
    """Holds back the encoder, and records the digests of the items that it began."""

    def __init__(self, engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.may, self._has_begun = threading.Semaphore(0), threading.Semaphore(0)
        encode = engine._runner._run_encoder

        def held(item: EngineItem) -> torch.Tensor:
            self.begun.append(item.features.digest)
            self._has_begun.release()
            self.may.acquire()
            return encode(item)

        monkeypatch.setattr(engine._runner, "_run_encoder", held)

    async def begin(self) -> None:
        """Returns when the encoder has begun one more item."""
        await asyncio.to_thread(self._has_begun.acquire)


async def test_texts_are_answered_while_an_item_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, items, expected = next(each for each in requests("llava") if each[1])
    with running(family("llava").model) as engine:
        encoder = HeldEncoder(engine, monkeypatch)
        image = asyncio.create_task(answer(engine, prompt, items, LONG))
        await encoder.begin()
        assert await asyncio.gather(*map(partial(answer, engine), map(text, range(3))))
        assert not image.done()
        encoder.may.release(9)
        assert await image == expected
        assert not any(embeds.requires_grad for embeds in engine._encoder_cache.values())  # no graph


async def test_what_need_not_be_encoded_does_not_wait_for_what_must(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = family("llava")
    known, sent, *others = (chosen.item(seed) for seed in range(6))
    ready = [[known], [encoded(chosen, sent)]]
    with running(chosen.model, EngineConfig(max_num_seqs=9)) as engine:
        expected = [await answer(engine, batched_families.prompt(0, items), items) for items in ready]
        encoder = HeldEncoder(engine, monkeypatch)
        slow = [
            asyncio.create_task(answer(engine, batched_families.prompt(1, [item]), [item])) for item in others
        ]
        await encoder.begin()
        assert [await answer(engine, batched_families.prompt(0, items), items) for items in ready] == expected
        encoder.may.release(9)
        await asyncio.gather(*slow)


async def test_hits_do_not_fill_the_encoder_cache() -> None:
    chosen = family("llava")
    items = [chosen.item(1)]
    with running(chosen.model) as engine:
        await answer(engine, batched_families.prompt(0, items), items)
        num_bytes = engine.stats().encoder_bytes
        for seed in range(3):
            await answer(engine, batched_families.prompt(seed, items), items)
        assert (engine.stats().encoder_bytes, engine.stats().encoder_misses) == (num_bytes, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_encoder_that_dies_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, items, _ = next(each for each in requests("llava") if each[1])
    with running(family("llava").model) as engine:
        monkeypatch.setattr(engine._runner, "encode", lambda _: _die())
        with pytest.raises(StageUnavailable):
            await answer(engine, prompt, items)
        engine._thread.join()
        with pytest.raises(StageUnavailable):
            engine.check_health()


async def test_items_of_several_requests_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = family("llava")
    many, one = [chosen.item(seed) for seed in range(3)], [chosen.item(7)]
    with running(chosen.model) as engine:
        encoder = HeldEncoder(engine, monkeypatch)
        tasks = [asyncio.create_task(answer(engine, batched_families.prompt(0, many), many))]
        await encoder.begin()
        tasks.append(asyncio.create_task(answer(engine, batched_families.prompt(1, one), one)))
        await answer(engine, text(0))  # both requests have been added
        encoder.may.release(9)
        await asyncio.gather(*tasks)
    assert encoder.begun[1] == one[0].features.digest
    assert len(encoder.begun) == 4


async def test_an_item_of_a_cancelled_request_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = family("llava")
    items = [chosen.item(seed) for seed in range(2)]
    with running(chosen.model) as engine:
        encoder = HeldEncoder(engine, monkeypatch)
        first, second = (
            asyncio.create_task(answer(engine, batched_families.prompt(0, [item]), [item])) for item in items
        )
        await encoder.begin()
        await answer(engine, text(0))  # the second item comes next
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        encoder.may.release(9)
        await first
        await answer(engine, text(0))
        assert encoder.begun == [items[0].features.digest]
        # A new request for it is served.
        assert await answer(engine, batched_families.prompt(0, items[1:]), items[1:])
        assert engine.stats().kv_tokens_used == 0


def spoilt(item: EngineItem, how: str) -> EngineItem:
    pixels = item.arrays["pixel_values"]
    bad = pixels[..., :7] if how == "shape" else np.full_like(pixels, np.nan)
    return replace(
        item, arrays=item.arrays | {"pixel_values": bad}, features=replace(item.features, digest=how)
    )


@pytest.mark.parametrize(
    ("how", "words"), [("shape", "The model failed"), ("nan", "NaN or infinite embeddings for this image")]
)
async def test_an_item_that_fails_fails_only_its_request(how: str, words: str) -> None:
    chosen = family("llava")
    bad = spoilt(chosen.item(0), how)
    with running(chosen.model) as engine:
        outcomes = await asyncio.gather(
            *(answer(engine, prompt, items, LONG) for prompt, items, _ in requests("llava")[:6]),
            answer(engine, batched_families.prompt(0, [bad]), [bad]),
            return_exceptions=True,
        )
        assert outcomes[:6] == [expected for *_, expected in requests("llava")[:6]]
        assert isinstance(outcomes[6], ServingError)
        assert words in str(outcomes[6])
        assert engine.stats().kv_tokens_used == 0
        engine.check_health()


@pytest.mark.parametrize("how", ["raises", "nan", "nan and left", "no memory"])
async def test_a_request_that_fails_in_a_batch_fails_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the model fail on one token id, since no prompt can make it fail."""
    chosen = family("text")
    embed = chosen.model.get_input_embeddings()
    good = [Prompt([20 + seed] * 10, []) for seed in range(6)]
    expected = [generated(chosen, prompt, []) for prompt in good]
    poison = next(token for token in range(100, 180) if not any(token in answer for answer in expected))

    def poisoned(ids: torch.Tensor) -> torch.Tensor:
        if how == "nan and left":  # in this step
            for sequence in engine._scheduler:
                sequence.request.cancelled |= poison in sequence.token_ids
        elif how != "nan" and (ids == poison).any():
            raise torch.OutOfMemoryError if how == "no memory" else RuntimeError
        return torch.where((ids == poison)[..., None], torch.nan, embed(ids))

    async with gated(chosen.model) as (engine, gate):
        monkeypatch.setattr(engine._runner, "_embed_tokens", poisoned)
        prompts = [*good[:3], Prompt([20] * 9 + [poison], []), *good[3:]]
        tasks = [await started(answer(engine, prompt)) for prompt in prompts]
        gate.open()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        broken = outcomes.pop(3)
        assert isinstance(broken, ServingError)
        assert ("out of memory" in broken.message) == (how == "no memory")
        assert outcomes == expected
        # The blocks that it left in the cache do no harm.
        rest = await asyncio.gather(*(answer(engine, prompt) for prompt in good))
        assert rest == expected
        engine.check_health()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_engine_fails_open_requests_and_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gated(family("text").model) as (engine, gate):
        engine.check_health()
        tasks = [await started(answer(engine, text(seed))) for seed in range(3)]
        await gate.steps(2)
        monkeypatch.setattr(engine._scheduler, "schedule", _die)
        gate.open()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, StageUnavailable) for outcome in outcomes)
        engine._thread.join()
        with pytest.raises(StageUnavailable):
            engine.check_health()
        with pytest.raises(StageUnavailable):
            await answer(engine, text(4))


def _die() -> None:
    raise SystemExit


async def test_slow_readers_get_the_missed_tokens_in_one_delta() -> None:
    async with gated(family("text").model) as (engine, gate):
        stream = engine.submit(text(1), [], GREEDY)
        first = await started(anext(stream))
        await gate.steps(12)
        assert len((await first).token_ids) >= 1
        rest = [delta async for delta in stream]
        assert sum(len(delta.token_ids) for delta in rest) == 12 - len(first.result().token_ids)
        assert len(rest) == 1
        assert rest[-1].finish_reason == "length"


async def test_the_first_delta_has_the_times() -> None:
    with running(family("text").model) as engine:
        first, *others = await deltas(engine, text(1), [], GREEDY)
    assert first.queue_ms > 0
    assert first.prefill_ms > 0
    assert all(delta.queue_ms == delta.prefill_ms == 0 for delta in others)


def _tiny(cls: Any, config: Any) -> Any:
    return cls(config).eval()


def test_models_that_are_not_batched() -> None:
    sizes = batched_families._LLAMA
    sliding = transformers.MistralConfig(**sizes, sliding_window=8)
    scaled = transformers.CohereConfig(**sizes, logit_scale=0.1)
    gemma = transformers.Gemma2Config(**sizes, head_dim=16)
    for cls, config, words in [
        (transformers.MistralForCausalLM, sliding, "full attention"),
        (transformers.Gemma2ForCausalLM, gemma, "full attention"),
        (transformers.CohereForCausalLM, scaled, "gives other logits than its own forward"),
    ]:
        assert words in (why_not_batched(_tiny(cls, config)) or "")
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    deep = transformers.Qwen3VLConfig(
        text_config=sizes | batched_families._MROPE | {"head_dim": 16}, vision_config=vision
    )
    assert "has not been tested" in (
        why_not_batched(_tiny(transformers.Qwen3VLForConditionalGeneration, deep)) or ""
    )


@pytest.mark.parametrize("name", ["no_repeat_ngram_size", "min_new_tokens"])
def test_a_setting_that_only_generate_obeys_prevents_batching(name: str) -> None:
    model = copy.deepcopy(family("text").model)
    setattr(model.generation_config, name, 3)
    assert why_not_batched(model) == f"its generation config sets {name}"


@pytest.mark.parametrize("name", FAMILIES)
def test_models_that_are_batched(name: str) -> None:
    assert why_not_batched(named(name).model) is None


@pytest.mark.parametrize("chosen", [f for f in WITH_MODELS if f.name in NOT_BATCHED], ids=str)
def test_families_that_are_not_batched(chosen: tiny_families.Family) -> None:
    assert why_not_batched(tiny_model(chosen))
