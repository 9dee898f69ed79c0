"""The embedding stage: what a client sent instead of media is verified here, far from whoever serves it."""

from __future__ import annotations

import asyncio
import threading

from pydantic import BaseModel, ConfigDict, Field

from deployments.errors import StageTimeout
from deployments.logs import log_refusals_in_one_line
from deployments.multimodal.embeds import load_embeds
from deployments.payload import let_go_on_error, pack, unpack_pieces
from deployments.pool import WorkPool
from deployments.types import Embedding, EmbeddingSource


class EmbeddingsConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_bytes: int = Field(default=2 * 2**30, gt=0)  # of one embedding's file, base64 undone
    threads: int = Field(default=2, ge=1)
    niceness: int = Field(default=19, ge=0, le=19)


class EmbeddingLoader:
    """Loads run side by side in the pool's threads; nothing is shared between them."""

    def __init__(self, config: EmbeddingsConfig) -> None:
        log_refusals_in_one_line()
        self._max_bytes = config.max_bytes
        self._pool = WorkPool(config.threads, config.niceness)

    async def load(self, source: EmbeddingSource, timeout_s: float) -> Embedding:
        """Raises MediaTooLarge, InvalidMedia with the reason, StageTimeout.

        A cancelled or timed-out load stops where it is: before it begins, or within a megabyte of base64.
        """
        stopped = threading.Event()
        with let_go_on_error(source.payloads):
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._load(source, stopped)
            except TimeoutError:
                raise StageTimeout("The embedding was not loaded in time.") from None
            finally:
                stopped.set()

    async def ready(self) -> None:
        """Returns when the stage can serve."""

    async def _load(self, source: EmbeddingSource, stopped: threading.Event) -> Embedding:
        encoded = await unpack_pieces(source.payloads)
        embeds, service_ms = await self._pool.run(
            load_embeds, encoded, max_bytes=self._max_bytes, hidden_size=source.hidden_size, stopped=stopped
        )
        num_tokens, hidden_size = embeds.values.shape
        return Embedding(
            source.modality,
            embeds.digest,
            num_tokens,
            hidden_size,
            embeds.dtype,
            await pack({"embeds": embeds.values}),
            sum(piece.size for piece in encoded),
            service_ms,
        )
