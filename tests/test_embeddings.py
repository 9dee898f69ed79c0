from __future__ import annotations

import asyncio
import base64
import io
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from deployments import embeddings
from deployments.embeddings import EmbeddingLoader, EmbeddingsConfig
from deployments.errors import InvalidMedia, MediaTooLarge, StageTimeout
from deployments.payload import pack_pieces, unpack, unpack_pieces
from deployments.types import EmbeddingSource, Modality


async def source_of(value: Any, hidden_size: int | None = None) -> EmbeddingSource:
    file = io.BytesIO()
    torch.save(value, file)
    payload = await pack_pieces([base64.b64encode(file.getvalue())])
    return EmbeddingSource(Modality.IMAGE, [payload], hidden_size)


async def test_loads_a_verified_embedding() -> None:
    tensor = torch.randn(3, 4, dtype=torch.bfloat16)
    source = await source_of(tensor, hidden_size=4)
    embedding = await EmbeddingLoader(EmbeddingsConfig()).load(source, timeout_s=30)
    values = (await unpack(embedding.payload))["embeds"]
    assert torch.equal(torch.from_numpy(values.copy()).view(torch.bfloat16), tensor)
    assert (embedding.modality, embedding.num_tokens, embedding.hidden_size) == (Modality.IMAGE, 3, 4)
    assert embedding.dtype == "bfloat16"
    assert embedding.num_bytes == sum(map(len, await unpack_pieces(source.payloads)))
    assert embedding.service_ms > 0


async def test_loads_run_side_by_side_and_results_are_their_own() -> None:
    loader = EmbeddingLoader(EmbeddingsConfig(threads=2))
    tensors = [torch.full((n + 1, 4), float(n)) for n in range(8)]
    loaded = await asyncio.gather(*[loader.load(await source_of(t), timeout_s=30) for t in tensors])
    assert [embedding.num_tokens for embedding in loaded] == list(range(1, 9))
    assert len({embedding.digest for embedding in loaded}) == 8


async def test_two_loads_are_in_flight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)
    load_embeds = embeddings.load_embeds

    def meet(*args: Any, **kwargs: Any) -> Any:
        both.wait()
        return load_embeds(*args, **kwargs)

    monkeypatch.setattr(embeddings, "load_embeds", meet)
    loader = EmbeddingLoader(EmbeddingsConfig(threads=2))
    source = await source_of(torch.zeros(1, 4))
    await asyncio.gather(loader.load(source, timeout_s=30), loader.load(source, timeout_s=30))


async def test_a_refusal_keeps_its_type_and_reason() -> None:
    loader = EmbeddingLoader(EmbeddingsConfig(max_bytes=10_000))
    with pytest.raises(InvalidMedia, match="hidden size is 4; the model's is 5"):
        await loader.load(await source_of(torch.zeros(1, 4), hidden_size=5), timeout_s=30)
    with pytest.raises(MediaTooLarge, match="the limit is 10000"):
        await loader.load(await source_of(torch.zeros(3000, 1)), timeout_s=30)


class Stalled:
    """Stands in for `load_embeds`: waits to be stopped."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.stopped = threading.Event()

    def __call__(
        self, encoded: Any, *, max_bytes: int, hidden_size: int | None, stopped: threading.Event
    ) -> None:
        self.begun.set()
        assert stopped.wait(30)
        self.stopped.set()


async def test_a_load_that_takes_too_long_is_a_timeout_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "load_embeds", stalled := Stalled())
    with pytest.raises(StageTimeout):
        await EmbeddingLoader(EmbeddingsConfig()).load(await source_of(torch.zeros(1, 4)), timeout_s=0.05)
    assert not stalled.begun.is_set() or await asyncio.to_thread(stalled.stopped.wait, 30)


async def test_a_cancelled_load_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "load_embeds", stalled := Stalled())
    source = await source_of(torch.zeros(1, 4))
    task = asyncio.create_task(EmbeddingLoader(EmbeddingsConfig()).load(source, timeout_s=30))
    assert await asyncio.to_thread(stalled.begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(stalled.stopped.wait, 30)


async def test_it_says_when_it_is_ready() -> None:
    await EmbeddingLoader(EmbeddingsConfig()).ready()


def test_unknown_settings_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="max_byte\n"):
        EmbeddingsConfig.model_validate({"max_byte": 1})


def test_the_stage_needs_no_torch() -> None:
    script = "import sys, deployments.embeddings; assert 'torch' not in sys.modules"
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=50)
