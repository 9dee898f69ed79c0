from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from deployments.errors import InvalidMedia, MediaTooLarge, StageTimeout
from deployments.media.embed_files import load_embeds
from deployments.runtime.payload import unpack
from deployments.stages import embedding_loader as embeddings
from deployments.stages.embedding_loader import EmbeddingLoader, EmbeddingLoaderConfig
from deployments.types import EmbeddingSource, EmbedsForm, MMFeatures, Modality
from tests.support.in_process import Direct
from tests.support.paths import ROOT
from tests.support.tiny_models import in_pieces

PLAIN = EmbedsForm(7)
GRID = EmbedsForm(7, grid="image_grid_thw", merge=2)
VIDEO = EmbedsForm(
    7,
    before=[(1, 2)],
    after=[(2, 1), (3, 1)],
    token_types={"mm_token_type_ids": 2},
    grid="video_grid_thw",
    merge=2,
    seconds="second_per_grid_ts",
)


async def source_of(
    value: Any, hidden_size: int = 4, form: EmbedsForm = PLAIN, **sent: Any
) -> EmbeddingSource:
    modality = Modality.VIDEO if form is VIDEO else Modality.IMAGE
    packed = await in_pieces(sent | {f"{modality}_embeds": value})
    return EmbeddingSource(modality, packed, form, hidden_size)


async def load(source: EmbeddingSource) -> MMFeatures:
    features: MMFeatures = await Direct(EmbeddingLoader(EmbeddingLoaderConfig())).load(source)
    return features


async def test_loads_a_verified_embedding() -> None:
    tensor = torch.randn(3, 4, dtype=torch.bfloat16)
    features = await load(await source_of(tensor))
    values = (await unpack(features.payload))["image_embeds"]
    assert torch.equal(torch.from_numpy(values.copy()).view(torch.bfloat16), tensor)
    assert (features.modality, features.num_tokens, features.length) == (Modality.IMAGE, 3, 3)
    assert features.replacement == [(7, 3)]
    assert features.shapes == {"image_embeds": ((3, 4), "bfloat16")}


@pytest.mark.parametrize(
    "grid", [[1, 2, 6], torch.tensor([1, 2, 6]), torch.tensor([[1, 2, 6]], dtype=torch.int32)]
)
async def test_a_grid_as_numbers_or_as_a_tensor(grid: Any) -> None:
    features = await load(await source_of(torch.zeros(3, 4), form=GRID, image_grid_thw=grid))
    arrays = await unpack(features.payload)
    assert list(arrays) == list(features.shapes) == ["image_grid_thw", "image_embeds"]
    np.testing.assert_array_equal(arrays["image_grid_thw"], [[1, 2, 6]])
    assert arrays["image_grid_thw"].dtype == np.int64


@pytest.mark.parametrize(
    "seconds", [{}, {"video_second_per_grid": [0.5]}, {"second_per_grid_ts": torch.tensor(0.5)}]
)
async def test_all_that_a_family_puts_around_embeddings(seconds: dict[str, Any]) -> None:
    source = await source_of(torch.zeros(4, 4), form=VIDEO, video_grid_thw=[2, 2, 4], **seconds)
    features = await load(source)
    arrays = await unpack(features.payload)
    assert features.replacement == [(1, 2), (7, 4), (2, 1), (3, 1)]
    assert arrays["mm_token_type_ids"].tolist() == [[0, 0, 2, 2, 2, 2, 0, 0]]
    assert arrays["second_per_grid_ts"].tolist() == ([0.5] if seconds else [1.0])
    assert arrays["second_per_grid_ts"].dtype == np.float32


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ({}, r"needs image_grid_thw .* \{\"image_embeds\": ..., \"image_grid_thw\": \[t, h, w\]\}"),
        ({"image_grid_thw": [2, 6]}, "three positive integers"),
        ({"image_grid_thw": [1, 2, 0]}, "three positive integers"),
        ({"image_grid_thw": [1, -2, -6]}, "three positive integers"),
        ({"image_grid_thw": [1.0, 2.0, 6.0]}, "three positive integers"),
        ({"image_grid_thw": [1, 2, 4]}, r"is \[1, 2, 4\] and there are 3 embeddings; .* each 2 x 2 cells"),
        ({"image_grid_thw": [1, 1, 12]}, "each 2 x 2 cells"),
        ({"image_grid_thw": [2**31, 2**31, 2**31]}, "each 2 x 2 cells"),
        ({"image_grid_thw": torch.tensor([1, 2, 6]).to(torch.int16)}, "image_grid_thw: Its dtype is int16"),
        ({"image_grid_thw": torch.ones(65)}, r"image_grid_thw: Its shape is \(65,\)"),
        ({"image_grid_thw": torch.ones(0)}, "image_grid_thw: Its shape"),
        ({"image_grid_thw": torch.ones(2, 6).t()}, "image_grid_thw: .*strides"),
        ({"image_grid_thw": torch.ones(10_000)}, r"image_grid_thw: Its shape is"),
    ],
)
async def test_a_grid_that_does_not_fit_is_refused(sent: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidMedia, match=reason):
        await load(await source_of(torch.zeros(3, 4), form=GRID, **sent))


@pytest.mark.parametrize("seconds", [[0.0], [-1.0], [1e9], [1, 1], torch.tensor([float("nan")])])
async def test_seconds_that_are_none_are_refused(seconds: Any) -> None:
    source = await source_of(
        torch.zeros(4, 4), form=VIDEO, video_grid_thw=[2, 2, 4], second_per_grid_ts=seconds
    )
    with pytest.raises(InvalidMedia, match="one number of seconds"):
        await load(source)


async def test_the_digest_is_of_all_that_makes_a_difference() -> None:
    async def digest(value: torch.Tensor, grid: list[int]) -> str:
        return (await load(await source_of(value, form=GRID, image_grid_thw=grid))).digest

    zeros, ones = torch.zeros(3, 4), torch.ones(3, 4)
    wide, tall = [1, 2, 6], [1, 6, 2]
    assert await digest(zeros, wide) == await digest(zeros, wide)
    assert len({await digest(zeros, wide), await digest(zeros, tall), await digest(ones, wide)}) == 3


async def test_loads_run_side_by_side_and_results_are_their_own() -> None:
    loader = Direct(EmbeddingLoader(EmbeddingLoaderConfig(threads=2)))
    tensors = [torch.full((n + 1, 4), float(n)) for n in range(8)]
    loaded = await asyncio.gather(*[loader.load(await source_of(t)) for t in tensors])
    assert [embedding.num_tokens for embedding in loaded] == list(range(1, 9))
    assert len({embedding.digest for embedding in loaded}) == 8


async def test_two_loads_are_in_flight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)

    def meet(*args: Any, **kwargs: Any) -> Any:
        both.wait()
        return load_embeds(*args, **kwargs)

    monkeypatch.setattr(embeddings, "load_embeds", meet)
    loader = Direct(EmbeddingLoader(EmbeddingLoaderConfig(threads=2)))
    source = await source_of(torch.zeros(1, 4))
    await asyncio.gather(loader.load(source), loader.load(source))


async def test_a_refusal_keeps_its_type_and_reason() -> None:
    loader = Direct(EmbeddingLoader(EmbeddingLoaderConfig(max_bytes=10_000)))
    with pytest.raises(InvalidMedia, match="hidden size is 4; the model's is 5"):
        await loader.load(await source_of(torch.zeros(1, 4), hidden_size=5))
    with pytest.raises(MediaTooLarge, match="the limit is 10000"):
        await loader.load(await source_of(torch.zeros(3000, 4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_what_is_not_finite_is_refused_where_it_is_checked(dtype: torch.dtype, value: float) -> None:
    tensor = torch.zeros(3, 4, dtype=dtype)
    tensor[1, 2] = value
    with pytest.raises(InvalidMedia, match=r"value at \[1, 2\] is not finite"):
        await load(await source_of(tensor))
    unchecked = Direct(EmbeddingLoader(EmbeddingLoaderConfig(check_finite=False)))
    assert (await unchecked.load(await source_of(tensor))).num_tokens == 3


class Stalled:
    """Stands in for `load_embeds`: waits to be stopped."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.stopped = threading.Event()

    def __call__(self, encoded: Any, *, stopped: threading.Event, **_: object) -> None:
        self.begun.set()
        assert stopped.wait(30)
        self.stopped.set()


async def test_a_load_that_takes_too_long_is_a_timeout_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "load_embeds", stalled := Stalled())
    with pytest.raises(StageTimeout):
        await Direct(EmbeddingLoader(EmbeddingLoaderConfig()), timeout_s=0.05).load(
            await source_of(torch.zeros(1, 4))
        )
    assert not stalled.begun.is_set() or await asyncio.to_thread(stalled.stopped.wait, 30)


async def test_a_cancelled_load_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "load_embeds", stalled := Stalled())
    source = await source_of(torch.zeros(1, 4))
    task = asyncio.create_task(Direct(EmbeddingLoader(EmbeddingLoaderConfig())).load(source))
    assert await asyncio.to_thread(stalled.begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(stalled.stopped.wait, 30)


async def test_it_says_when_it_is_ready() -> None:
    assert await EmbeddingLoader(EmbeddingLoaderConfig()).describe() is None


def test_unknown_settings_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="max_byte\n"):
        EmbeddingLoaderConfig.model_validate({"max_byte": 1})


def test_the_stage_needs_no_torch() -> None:
    script = "import sys, deployments.stages.embedding_loader; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=50)
