"""The embedding stage: verifies and loads embeddings that a client sent in place of media."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from pydantic import Field

from deployments.errors import InvalidMedia
from deployments.media.base64_stream import Piece
from deployments.media.embed_files import Embeds, load_embeds, load_numbers
from deployments.runtime.call_record import current_call
from deployments.runtime.payload import pack, unpack_pieces
from deployments.runtime.pool import WorkPool
from deployments.runtime.tracing import traced
from deployments.stages.base import Stage, StageConfig, endpoint, pool_activity
from deployments.types import SECONDS_PER_GRID, Activity, Arrays, EmbeddingSource, EmbedsForm, MMFeatures

logger = logging.getLogger("ray.serve")

MAX_SECONDS = 3600.0  # longest time that one step of a video's grid may last

Numbers = dict[str, npt.NDArray[Any]]  # by name, flat


class EmbeddingLoaderConfig(StageConfig):
    max_bytes: int = Field(
        default=2 * 2**30, gt=0, description="Largest file of one embedding, in bytes after base64 decoding."
    )
    check_finite: bool = Field(default=True, description="Refuse embeddings with NaN or infinity.")
    threads: int = Field(default=2, ge=1, description="Embeddings that a replica loads at once.")
    niceness: int = Field(
        default=19,
        ge=0,
        le=19,
        description="Scheduling priority of these threads, from 0 (normal) to 19 (lowest).",
    )


class EmbeddingLoader(Stage):
    """Verifies and loads embeddings. Loads run concurrently in the pool's threads and share nothing."""

    def __init__(self, config: EmbeddingLoaderConfig) -> None:
        super().__init__(config)
        self._config = config
        self._pool = WorkPool(config.threads, config.niceness)
        self.ready()

    @endpoint
    async def load(self, source: EmbeddingSource) -> MMFeatures:
        """Raises MediaTooLarge, InvalidMedia with the reason, or RayError for lost data.

        A load that is cancelled or times out stops before it begins, or between two slices of base64.
        """
        stopped = threading.Event()
        try:
            return await self._load(source, stopped)
        finally:
            stopped.set()

    def _activity(self) -> list[Activity]:
        return pool_activity(self, self._pool)

    async def _load(self, source: EmbeddingSource, stopped: threading.Event) -> MMFeatures:
        """Loads the embeddings and the numbers that belong to them at the same time."""
        sent: dict[str, list[Piece] | npt.NDArray[Any]] = {
            name: await unpack_pieces(value) if isinstance(value, list) else value
            for name, value in source.sent.items()
        }
        encoded = sent[source.name]
        assert isinstance(encoded, list)
        names = [name for name in sent if name != source.name]
        embeds, numbers = await asyncio.gather(
            self._pool.run(
                traced("embed")(load_embeds),
                encoded,
                max_bytes=self._config.max_bytes,
                hidden_size=source.hidden_size,
                stopped=stopped,
                check_finite=self._config.check_finite,
            ),
            asyncio.gather(*(self._pool.run(_numbers, name, sent[name], stopped) for name in names)),
        )
        num_tokens = len(embeds.values)
        sent_numbers = dict(zip(names, numbers, strict=True))
        positions = _positions(source, sent_numbers, num_tokens)
        made = {source.name: embeds.values} | positions | _token_types(source.form, num_tokens)
        # In the order in which the client sent them; arrays that it did not send come last.
        arrays = {name: made[name] for name in sent if name in made} | made
        payload = await self._pool.run(pack, arrays)
        ms = current_call().service_ms
        logger.info("loaded %s: %d tokens of %s in %.1f ms", source.name, num_tokens, embeds.dtype, ms)
        return MMFeatures(
            modality=source.modality,
            digest=_digest(embeds, positions),
            num_tokens=num_tokens,
            replacement=[*source.form.before, (source.form.token_id, num_tokens), *source.form.after],
            payload=payload,
            shapes={name: (array.shape, array.dtype.name) for name, array in arrays.items()}
            | {source.name: (embeds.values.shape, embeds.dtype)},
            affixes=source.form.affixes,
        )


def _numbers(name: str, sent: list[Piece] | npt.NDArray[Any], stopped: threading.Event) -> npt.NDArray[Any]:
    if not isinstance(sent, list):
        return sent
    try:
        return load_numbers(sent, stopped)
    except InvalidMedia as error:
        raise type(error)(f"{name}: {error.message}") from None


def _positions(source: EmbeddingSource, numbers: Numbers, num_tokens: int) -> Arrays:
    """Returns the arrays from which the model derives positions, in the shapes that its processor gives."""
    arrays: Arrays = {}
    if source.form.grid:
        arrays[source.form.grid] = _grid(source, numbers, num_tokens)
    if source.form.seconds:
        arrays[source.form.seconds] = _seconds(numbers)
    return arrays


def _token_types(form: EmbedsForm, num_tokens: int) -> Arrays:
    before, after = (sum(count for _, count in runs) for runs in (form.before, form.after))
    return {
        name: np.pad(np.full((1, num_tokens), value), ((0, 0), (before, after)))
        for name, value in form.token_types.items()
    }


def _grid(source: EmbeddingSource, numbers: Numbers, num_tokens: int) -> npt.NDArray[np.int64]:
    form = source.form
    if form.grid not in numbers:
        raise InvalidMedia(
            f"This model needs {form.grid} in addition to the embeddings: send"
            f' {{"{source.name}": ..., "{form.grid}": [t, h, w]}}.'
        )
    grid = numbers[form.grid]
    if grid.size != 3 or grid.dtype.kind != "i" or grid.min() < 1:
        raise InvalidMedia(f"{form.grid} must be three positive integers: t, h, w.")
    t, h, w = grid.tolist()
    if h % form.merge or w % form.merge or t * h * w != num_tokens * form.merge**2:
        raise InvalidMedia(
            f"{form.grid} is [{t}, {h}, {w}] and there are {num_tokens} embeddings; this model has one for"
            f" each {form.merge} x {form.merge} cells of h and w."
        )
    return grid.astype(np.int64).reshape(1, 3)


def _seconds(numbers: Numbers) -> npt.NDArray[np.float32]:
    sent = next((numbers[name] for name in SECONDS_PER_GRID if name in numbers), np.ones(1))
    if sent.size != 1 or not 0 < float(sent.flat[0]) <= MAX_SECONDS:
        raise InvalidMedia(
            f"{' or '.join(SECONDS_PER_GRID)} must be one number of seconds, at most {MAX_SECONDS:g}."
        )
    return sent.astype(np.float32).reshape(1)


def _digest(embeds: Embeds, positions: Arrays) -> str:
    """Digests everything that changes the model's result."""
    numbers = [(name, array.tolist()) for name, array in positions.items()]
    return blake3(f"{embeds.digest} {numbers}".encode()).hexdigest()
