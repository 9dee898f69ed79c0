"""The preprocessing stage: one media item becomes what the model takes, by the checkpoint's own processor."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from pydantic import Field

from deployments.errors import ArraysEvicted, StageTimeout, UnknownUUID, UnsupportedMedia
from deployments.media import data_uri
from deployments.media.decoder import Decoder, content_digest, silence_pillow
from deployments.media.image import Canvas
from deployments.processor.checkpoint import load_processor
from deployments.processor.exactness import only_what_is_exact
from deployments.processor.feature_cache import FeatureCache
from deployments.processor.item_processor import ItemProcessor
from deployments.processor.settings import ProcessorSettings
from deployments.runtime.logs import log_context
from deployments.runtime.memory import freeze_start_up, release_on_error
from deployments.runtime.metrics import publish, report_activity, report_cache
from deployments.runtime.payload import pack, unpack, unpack_pieces
from deployments.runtime.pool import WorkPool
from deployments.runtime.single_flight import SingleFlight
from deployments.runtime.tracing import served, span, traced
from deployments.stages.base import StageConfig, begin
from deployments.types import (
    Activity,
    Arrays,
    InputSpec,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    MMBatch,
    MMFeatures,
    MMItem,
    Modality,
)

logger = logging.getLogger("ray.serve")


class MMPreprocessorConfig(StageConfig):
    model: str = "tiny-omni"  # name of a bundled checkpoint, folder, or hub id
    chat_template: str = ""  # a file; empty: the checkpoint's own
    threads: int = Field(default=1, ge=1)  # items at once in a replica
    torch_threads: int = Field(default=1, ge=1)  # of torch, for each item
    niceness: int = Field(default=19, ge=0, le=19)
    cache_bytes: int = Field(default=2**30, ge=0)  # of processed items that a replica keeps; 0: none


class MMPreprocessor:
    """Runs the checkpoint's processor over one item at a time."""

    def __init__(self, config: MMPreprocessorConfig, decoder: Decoder) -> None:
        begin(self, config)
        import torch

        torch.set_num_threads(config.torch_threads)
        silence_pillow()
        # Arrays from the object store are read-only. Processors read them and no more (there is a test).
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._decoder = decoder
        self._canvas = Canvas()
        self._pool = WorkPool(config.threads, config.niceness)
        self._reading = WorkPool(1, config.niceness)  # what is known already does not wait for other work
        first = only_what_is_exact(ItemProcessor(load_processor(config.model, config.chat_template)))
        self._spec = replace(first.spec(), caches=config.cache_bytes > 0)
        self._digests = first.digests
        self._cache = FeatureCache(config.cache_bytes)
        self._flights: SingleFlight[list[MMItem]] = SingleFlight()
        # The tokenizer inside must not be used from several threads at once: each call borrows a processor.
        self._idle: SimpleQueue[ItemProcessor] = SimpleQueue()
        self._idle.put(first)
        for _ in range(config.threads - 1):
            self._idle.put(copy.deepcopy(first))
        self._done = 0
        publish(self._report)
        freeze_start_up()

    @served
    async def process(self, media: Media, settings: ProcessorSettings | None, timeout_s: float) -> MMFeatures:
        """`settings`: of the request, see `deployments.processor.settings`.

        Raises UnsupportedMedia, InvalidMedia, MediaTooLarge, StageTimeout, or RayError for lost arrays.
        """
        (features,) = (await self.process_together([media], settings, timeout_s)).features
        return features

    @served
    async def process_together(
        self, items: list[Media], settings: ProcessorSettings | None, timeout_s: float
    ) -> MMBatch:
        """All items of a request of one modality, in one call of the processor: see `InputSpec.joint`."""
        modality = items[0].modality
        with release_on_error(), log_context(items[0].param):
            self._check_modality(modality)
            digests = self._digests(items, settings)
            done = self._find(digests)
            if done is None:
                if tuple(digests) not in self._flights and any(media.payload is None for media in items):
                    raise ArraysEvicted("An item was decoded before, but is not kept in this replica.")
                work = partial(self._process_and_keep, items, settings)
                async with _in_time(timeout_s, modality):
                    done = await self._flights.run(tuple(digests), work)
            for media in items:
                if media.uuid:
                    self._cache.remember_uuid(media.uuid, _bare(media))
            self._done += len(items)
            return MMBatch([each.features for each in done], done[0].features.service_ms)

    @served
    async def read(
        self,
        source: MediaSource,
        options: MediaOptions,
        settings: ProcessorSettings | None,
        name: MediaUUID | None,
        by_reference: bool,
        timeout_s: float,
    ) -> MMItem:
        """An item whose data came in the request, decoded and processed in one go.

        Unless `by_reference`, features that are too large for a message are left out. Raises as
        `MediaLoader.load` and `process` do.
        """
        with release_on_error(source.payloads), log_context(source.param):
            self._check_modality(source.modality)
            async with _in_time(timeout_s, source.modality):
                done = await self._read(source, options, settings)
            if name:
                self._cache.remember_uuid(name, done.media)
            self._done += 1
            payload = done.features.payload
            if payload and payload.ref is not None and not by_reference:
                self._cache.keep_for_next_call(done)
                return replace(done, features=replace(done.features, payload=None))
            return done

    @served
    async def recall(self, name: MediaUUID, settings: ProcessorSettings | None = None) -> MMItem:
        """Raises UnknownUUID where nothing, or nothing processed with these settings, is kept by it."""
        media = self._cache.media_of_uuid(name)
        known = self._find(self._digests([media], settings)) if media else None
        if known is None:
            raise UnknownUUID(
                f"No {name.modality} is known by the uuid {name.uuid!r} (any more). Send it with its uuid."
            )
        self._done += 1
        return known[0]

    async def reset_cache(self) -> None:
        self._cache.clear()

    def _check_modality(self, modality: Modality) -> None:
        if modality not in self._spec.modalities:
            raise UnsupportedMedia(f"This model does not take {modality}.")

    def _find(self, digests: list[str]) -> list[MMItem] | None:
        """All of them, or none."""
        found = [kept for digest in digests if (kept := self._cache.find(digest))]
        if len(found) < len(digests):
            return None
        return [
            MMItem(
                replace(kept.media, cached=True, service_ms=0.0),
                replace(kept.features, cached=True, service_ms=0.0),
            )
            for kept in found
        ]

    async def _read(
        self, source: MediaSource, options: MediaOptions, settings: ProcessorSettings | None
    ) -> MMItem:
        pieces = await unpack_pieces(source.payloads)
        decode = partial(data_uri.decode, source.header, pieces, self._decoder.max_bytes[source.modality])
        (data, digest), ms = await self._reading.run(content_digest, decode, source.modality, options)
        item = Media(source.modality, digest, num_bytes=len(data))
        digests = self._digests([item], settings)
        work = partial(self._decode_and_keep, data, item, options, settings)
        (done,) = self._find(digests) or await self._flights.run(tuple(digests), work)
        return replace(done, media=replace(done.media, service_ms=ms + done.media.service_ms))

    async def _process_and_keep(self, items: list[Media], settings: ProcessorSettings | None) -> list[MMItem]:
        arrays = await asyncio.gather(*(unpack(media.payload) for media in items))
        pairs = list(zip(items, arrays, strict=True))
        processed, ms = await self._pool.run(self._process, pairs, settings)
        return self._keep(items, [replace(features, service_ms=ms) for features in processed])

    async def _decode_and_keep(
        self, data: bytes, item: Media, options: MediaOptions, settings: ProcessorSettings | None
    ) -> list[MMItem]:
        cancelled = threading.Event()
        try:
            work = self._pool.run(self._decode_and_process, data, item, options, settings, cancelled)
            (media, features), ms = await work
        finally:
            cancelled.set()
        return self._keep([media], [replace(features, service_ms=ms - media.service_ms)])

    def _keep(self, items: list[Media], processed: list[MMFeatures]) -> list[MMItem]:
        done = []
        for media, features in zip(items, processed, strict=True):
            told = (media.modality, features.num_tokens, features.service_ms)
            logger.info("preprocessed %s: %d tokens in %.1f ms", *told)
            done.append(MMItem(_bare(media), features))
            self._cache.store(done[-1])
        return done

    async def describe(self) -> InputSpec:
        return self._spec

    async def activity(self) -> list[Activity]:
        return self._activity()

    def _activity(self) -> list[Activity]:
        pool, cache = self._pool, self._cache
        return [Activity("preprocess", pool.queued, pool.in_flight, self._done, cache.hits, cache.misses)]

    def _report(self) -> None:
        report_activity(self._activity())
        cache = self._cache
        report_cache(
            "features",
            hits=cache.hits,
            misses=cache.misses,
            joins=self._flights.joins,
            evictions=cache.evictions,
            num_bytes=cache.bytes,
        )

    def _decode_and_process(
        self,
        data: bytes,
        item: Media,
        options: MediaOptions,
        settings: ProcessorSettings | None,
        cancelled: threading.Event,
    ) -> tuple[Media, MMFeatures]:
        start = time.perf_counter()
        with span("decode"):
            media, arrays = self._decoder.decode(
                data, item.digest, item.modality, options, cancelled, self._canvas
            )
        ms = (time.perf_counter() - start) * 1000
        logger.info("loaded %s: %d bytes of %s in %.1f ms", item.modality, len(data), media.mime, ms)
        (features,) = self._process([(media, arrays)], settings)
        return replace(media, service_ms=ms), features

    @traced("preprocess")
    def _process(
        self, items: list[tuple[Media, Arrays]], settings: ProcessorSettings | None
    ) -> list[MMFeatures]:
        processor = self._idle.get()
        try:
            return [each.record(pack(each.features)) for each in processor.process(items, settings)]
        finally:
            self._idle.put(processor)


@asynccontextmanager
async def _in_time(timeout_s: float, modality: Modality) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise StageTimeout(f"There was no time left to preprocess this {modality}.") from None


def _bare(media: Media) -> Media:
    return replace(media, payload=None, previews=[], uuid=None, param="")
