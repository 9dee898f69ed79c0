"""Compares the batched engine with `generate`, one by one and in static batches. Ratios are of one run.

    .venv/bin/python -m scripts.bench_engine [--model tiny-omni|qwen2.5-vl] [--seconds 10]

`qwen2.5-vl` is a tiny random model. A folder or an id on the hub works too if its images are Qwen's. Each
client sends the next request right after an answer. Prompts have 32 tokens, answers 16 to 112.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from deployments.engine.base import Engine, EngineItem
from deployments.engine.batched_engine import BatchedEngine
from deployments.engine.config import EngineConfig
from deployments.engine.transformers_engine import TransformersEngine
from deployments.processor.checkpoint import load_model
from deployments.types import MMFeatures, Modality, Prompt, SamplingParams

PROMPT, SHORTEST, LONGEST = 32, 16, 112
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-omni")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=10, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the model's stage
    model = (
        tiny_qwen() if options.model == "qwen2.5-vl" else load_model(options.model, options.device, "auto")
    )
    asyncio.run(bench(model, options.seconds))


async def bench(model: Any, seconds: float) -> None:
    print(f"{type(model).__name__} on {model.device}, {model.dtype}, {os.cpu_count()} CPUs\n")
    generate(model, 1, seconds / 4)  # warm
    plain = generate(model, 1, seconds)
    print(f"{'':24}{'tokens/s':>9}{'x':>7}{'TTFT p50':>11}{'p99 ms':>9}{'ITL p50':>10}{'p99 ms':>9}")
    print(f"{'generate, one by one':24}{plain:9.0f}{1:7.1f}")
    for size in (4, 16, 64):
        rate = generate(model, size, seconds)
        print(f"{f'static batches of {size}':24}{rate:9.0f}{rate / plain:7.1f}")
    with closing(TransformersEngine(model)) as engine:
        await closed_loop(engine, 1, seconds / 4)
        show("generate engine, 1", await closed_loop(engine, 1, seconds), plain)
    with closing(BatchedEngine(model)) as engine:
        await closed_loop(engine, 16, seconds / 4)
        rates = {}
        for clients in (1, 4, 16, 64):
            load = await closed_loop(engine, clients, seconds)
            rates[clients] = load.rate
            show(f"batched engine, {clients}", load, plain)
    print(f"\nfrom 1 to 16 clients: {rates[16] / rates[1]:.1f}x")
    await one_stream(model)
    await long_prompt(model)
    await repeated_image(model)


async def one_stream(model: Any) -> None:
    """Gets the same answers from `generate` and from the engine, in turns.

    Prints CPU time too, since other processes disturb it less.
    """
    length = 200
    wall: dict[str, list[float]] = {"generate": [], "engine": []}
    cpu: dict[str, list[float]] = {"generate": [], "engine": []}
    with closing(BatchedEngine(model)) as engine:
        for seed in range(2 * ROUNDS):
            prompt = text(seed, PROMPT)
            for name in wall:
                start, used = time.perf_counter(), time.process_time()
                if name == "engine":
                    await Load().ask(engine, prompt, [], length)
                else:
                    generated(model, [prompt], length)
                wall[name].append((time.perf_counter() - start) * 1000 / length)
                cpu[name].append((time.process_time() - used) * 1000 / length)
    figures = [
        f"{name} {statistics.median(wall[name]):.2f} ms ({statistics.median(cpu[name]):.2f} of CPU)"
        for name in wall
    ]
    print(f"\none stream, a token: {', '.join(figures)}")


async def long_prompt(model: Any) -> None:
    """Prints the largest gap between two tokens of eight streams while the longest prompt is prefilled."""
    with closing(BatchedEngine(model)) as engine:
        length = engine.spec.max_model_len - 2
        alone, beside, first_alone, first_beside = [], [], Load(), Load()
        for seed in range(ROUNDS):
            alone.append(await streams(engine, lambda: asyncio.sleep(0)))
            longest = text(seed, length)
            beside.append(await streams(engine, partial(first_beside.ask, engine, longest, [], 1)))
            await first_alone.ask(engine, text(100 + seed, length), [], 1)
    whole = await whole_prompt(model, longest)
    gaps = [statistics.median(each) for each in (alone, beside)]
    first = [statistics.median(load.first) * 1000 for load in (first_alone, first_beside)]
    print(f"\nlargest gap of 8 streams: {gaps[0]:.1f} ms; with a prompt of {length} tokens beside them")
    print(f"{gaps[1]:.1f} ms, {whole:.0f} ms as a single chunk; TTFT of that prompt {first[1]:.0f} ms,")
    print(f"without the streams {first[0]:.0f} ms (medians of {ROUNDS})", flush=True)


async def streams(engine: Engine, during: Callable[[], Awaitable[object]]) -> float:
    """Returns the largest gap in ms."""
    going, load = asyncio.Event(), Load()
    asks = (load.ask(engine, text(seed, PROMPT), [], 300, going) for seed in range(8))
    tasks = [asyncio.create_task(ask) for ask in asks]
    await going.wait()
    await during()
    await asyncio.gather(*tasks)
    return max(load.gaps) * 1000


async def whole_prompt(model: Any, prompt: Prompt) -> float:
    with closing(BatchedEngine(model, EngineConfig(max_num_batched_tokens=2**20))) as engine:
        load = Load()
        await load.ask(engine, prompt, [], 1)
        return load.first[0] * 1000


async def repeated_image(model: Any) -> None:
    """Prints the TTFT of a new image, of a known one after the same text, and of one after another text."""
    with closing(BatchedEngine(model)) as engine:
        new, same, other = Load(), Load(), Load()
        for seed in range(20):
            item = image(model, seed)
            for load, text_seed in ((new, seed), (same, seed), (other, 1000 + seed)):
                prompt = with_image(text(text_seed, PROMPT))
                await load.ask(engine, prompt, [item], 1)
        tokens = item.features.num_tokens
    times = [float(np.median(load.first)) * 1000 for load in (new, same, other)]
    print(f"\nTTFT p50 with an image of {tokens} tokens: new {times[0]:.1f} ms, after the same text")
    print(f"{times[1]:.1f} ms ({times[0] / times[1]:.1f}x), after another text {times[2]:.1f} ms")


@dataclass(slots=True)
class Load:
    """Measurements of clients."""

    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)  # s, until the first token
    gaps: list[float] = field(default_factory=list)  # s, between two deltas of an answer

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    async def ask(
        self,
        engine: Engine,
        prompt: Prompt,
        items: list[EngineItem],
        max_tokens: int,
        going: asyncio.Event | None = None,
    ) -> None:
        before = start = time.perf_counter()
        async for delta in engine.submit(prompt, items, SamplingParams(max_tokens, ignore_eos=True)):
            now = time.perf_counter()
            if before == start:
                self.first.append(now - start)
            else:
                self.gaps.append(now - before)
            before = now
            self.tokens += len(delta.token_ids)
            if going:
                going.set()


async def closed_loop(engine: Engine, clients: int, seconds: float) -> Load:
    """Measures for `seconds`, then cancels the clients, so that all of them are active all the time."""
    load, seeds = Load(), count()

    async def client() -> None:
        while True:
            seed = next(seeds)
            await load.ask(engine, text(seed, PROMPT), [], answer_length(seed))

    start = time.perf_counter()
    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    await asyncio.sleep(seconds)
    measured = replace(load, seconds=time.perf_counter() - start)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return measured


def generate(model: Any, size: int, seconds: float) -> float:
    """Returns requested tokens per second. A batch runs until its longest answer is complete."""
    start, tokens = time.perf_counter(), 0
    for batch in count():
        seeds = range(batch * size, (batch + 1) * size)
        lengths = [answer_length(seed) for seed in seeds]
        generated(model, [text(seed, PROMPT) for seed in seeds], max(lengths))
        tokens += sum(lengths)
        if time.perf_counter() > start + seconds:
            break
    return tokens / (time.perf_counter() - start)


@torch.inference_mode()
def generated(model: Any, prompts: list[Prompt], length: int) -> None:
    ids = torch.tensor([prompt.token_ids for prompt in prompts], device=model.device)
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=length,
        eos_token_id=[model.config.get_text_config().vocab_size],
        pad_token_id=0,
    )


def show(name: str, load: Load, plain: float) -> None:
    first, gaps = (np.percentile(np.array(each) * 1000, [50, 99]) for each in (load.first, load.gaps))
    rate = f"{load.rate:9.0f}{load.rate / plain:7.1f}"
    print(f"{name:24}{rate}{first[0]:11.1f}{first[1]:9.1f}{gaps[0]:10.2f}{gaps[1]:9.2f}", flush=True)


def answer_length(seed: int) -> int:
    return int(np.random.default_rng(seed).integers(SHORTEST, LONGEST + 1))


def text(seed: int, length: int) -> Prompt:
    return Prompt(np.random.default_rng(seed).integers(20, 180, length).tolist(), [])


def with_image(prompt: Prompt) -> Prompt:
    place = len(prompt.token_ids) // 2
    ids = [*prompt.token_ids[:place], 0, *prompt.token_ids[place:]]
    return Prompt(ids, [(Modality.IMAGE, place)])


def image(model: Any, seed: int, height: int = 24, width: int = 24) -> EngineItem:
    """Returns random pixels in the format of Qwen's processors."""
    config, vision = model.config, model.config.vision_config
    size = 3 * vision.temporal_patch_size * vision.patch_size**2
    num_tokens = height * width // vision.spatial_merge_size**2
    pixels = np.random.default_rng(seed).normal(size=(height * width, size)).astype(np.float32)
    token_id = config.image_token_id
    ids = [(config.vision_start_token_id, 1), (token_id, num_tokens), (config.vision_end_token_id, 1)]
    arrays = {
        "pixel_values": pixels,
        "image_grid_thw": np.array([[1, height, width]]),
        "mm_token_type_ids": np.array([[0] + [1] * num_tokens + [0]]),
    }
    digest = hashlib.sha256(pixels.tobytes()).hexdigest()
    return EngineItem(MMFeatures(Modality.IMAGE, digest, num_tokens, ids, None, {}), arrays)


def tiny_qwen() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": 8,
            "out_hidden_size": 128,
        },
        image_token_id=1001,
        video_token_id=1002,
        vision_start_token_id=1003,
        vision_end_token_id=1004,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


@contextmanager
def closing(engine: Any) -> Iterator[Any]:
    try:
        yield engine
    finally:
        engine.close()


if __name__ == "__main__":
    main()
