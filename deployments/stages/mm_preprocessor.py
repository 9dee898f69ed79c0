"""The preprocessing stage: turns one media item into the model's features with the checkpoint's own
processor.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from pydantic import Field

from deployments.errors import ArraysEvicted, UnknownUUID, UnsupportedMedia
from deployments.media import data_uri
from deployments.media.decoder import Decoder, content_digest, silence_pillow
from deployments.media.image import Canvas
from deployments.processor.checkpoint import load_processor
from deployments.processor.exactness import only_what_is_exact
from deployments.processor.feature_cache import FeatureCache
from deployments.processor.item_processor import ItemProcessor
from deployments.processor.settings import ProcessorSettings
from deployments.runtime.call_record import current_call
from deployments.runtime.payload import pack, unpack, unpack_pieces
from deployments.runtime.pool import WorkPool
from deployments.runtime.single_flight import SingleFlight
from deployments.runtime.tracing import span, traced
from deployments.stages.base import CacheStats, CheckpointConfig, Stage, endpoint, pool_activity
from deployments.types import (
    Activity,
    Arrays,
    InputSpec,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    MMFeatures,
    MMItem,
    Modality,
)

logger = logging.getLogger("ray.serve")


class MMPreprocessorConfig(CheckpointConfig):
    threads: int = Field(
        default=1,
        ge=1,
        description="Items that a replica processes at once. Decoding of images in the request is included.",
    )
    torch_threads: int = Field(default=1, ge=1, description="Threads that torch uses for each item.")
    niceness: int = Field(
        default=19,
        ge=0,
        le=19,
        description="Scheduling priority of the threads, from 0 (normal) to 19 (lowest).",
    )
    cache_bytes: int = Field(
        default=2**30,
        ge=0,
        description="Processed items that a replica keeps, by content, in bytes. 0 switches the cache off.",
    )


class MMPreprocessor(Stage):
    """Runs the checkpoint's processor over one item at a time."""

    def __init__(self, config: MMPreprocessorConfig, decoder: Decoder) -> None:
        super().__init__(config)
        import torch

        torch.set_num_threads(config.torch_threads)
        silence_pillow()
        # Arrays from the object store are read-only, and processors only read them: a test checks that.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._decoder = decoder
        self._canvas = Canvas()
        self._pool = WorkPool(config.threads, config.niceness)
        self._digesting = WorkPool(1, config.niceness)  # apart: a cached item must not wait for other work
        first = only_what_is_exact(ItemProcessor(load_processor(config.model, config.chat_template)))
        self._spec = replace(first.spec(), caches=config.cache_bytes > 0)
        self._digests = first.digests
        self._cache = FeatureCache(config.cache_bytes)
        self._flights: SingleFlight[list[MMItem]] = SingleFlight()
        # The tokenizer in a processor must not be used from several threads at once, so each job borrows one.
        self._idle: SimpleQueue[ItemProcessor] = SimpleQueue()
        self._idle.put(first)
        for _ in range(config.threads - 1):
            self._idle.put(copy.deepcopy(first))
        self.ready()

    @endpoint
    async def process(
        self, items: list[Media], settings: ProcessorSettings | None = None
    ) -> list[MMFeatures]:
        """Returns the features of decoded items of one modality, in order.

        Several items go through one call of the processor: a request's items of a joint modality.
        `settings` are the request's own, see `deployments.processor.settings`. Raises UnsupportedMedia,
        InvalidMedia, MediaTooLarge; ArraysEvicted or RayError if the arrays are needed and not available.
        """
        self._check_modality(items[0].modality)
        digests = self._digests(items, settings)
        done = self._find(digests)
        if done is None:
            key = tuple(digests)
            if key not in self._flights and any(media.payload is None for media in items):
                raise ArraysEvicted("The item was decoded before, but its features are not cached any more.")
            done = await self._flights.run(key, partial(self._process_and_keep, items, settings))
        for media in items:
            if media.uuid:
                self._cache.remember_uuid(media.uuid, _without_arrays(media))
        return [each.features for each in done]

    @endpoint
    async def read(
        self,
        source: MediaSource,
        options: MediaOptions,
        settings: ProcessorSettings | None = None,
        uuid: MediaUUID | None = None,
        in_message: bool = False,
    ) -> MMItem:
        """Decodes and processes an item whose data came with the request.

        `in_message`: the reply must not refer to the object store, so features that are too large for a
        message are left out. Raises the errors of `MediaLoader.load` and of `process`.
        """
        self._check_modality(source.modality)
        done = await self._find_or_decode(source, options, settings)
        if uuid:
            self._cache.remember_uuid(uuid, done.media)
        payload = done.features.payload
        if in_message and payload and payload.ref is not None:
            self._cache.keep_for_next_call(done)
            return replace(done, features=replace(done.features, payload=None))
        return done

    @endpoint
    async def recall(self, uuid: MediaUUID, settings: ProcessorSettings | None = None) -> MMItem:
        """Returns the cached item that a client named `uuid`.

        Raises UnknownUUID if there is none, or none that was processed with these settings.
        """
        media = self._cache.media_of_uuid(uuid)
        known = self._find(self._digests([media], settings)) if media else None
        if known is None:
            raise UnknownUUID(
                f"The uuid {uuid.uuid!r} does not name a cached {uuid.modality}."
                " Send the item again with its uuid."
            )
        return known[0]

    async def reset_cache(self) -> None:
        self._cache.clear()

    async def describe(self) -> InputSpec:
        return self._spec

    def _activity(self) -> list[Activity]:
        return pool_activity(self, self._pool, self._caches()["features"])

    def _caches(self) -> dict[str, CacheStats]:
        cache = self._cache
        joins = self._flights.joins
        return {"features": CacheStats(cache.hits, cache.misses, cache.evictions, joins, cache.bytes)}

    def _check_modality(self, modality: Modality) -> None:
        if modality not in self._spec.modalities:
            takes = ", ".join(self._spec.modalities) or "text only"
            raise UnsupportedMedia(f"This model does not accept {modality}; it accepts {takes}.")

    def _find(self, digests: Sequence[str]) -> list[MMItem] | None:
        """Returns the cached items of all digests, or None if one is missing."""
        found = [item for digest in digests if (item := self._cache.find(digest))]
        if len(found) < len(digests):
            return None
        return [
            MMItem(replace(item.media, cached=True), replace(item.features, cached=True)) for item in found
        ]

    async def _find_or_decode(
        self, source: MediaSource, options: MediaOptions, settings: ProcessorSettings | None
    ) -> MMItem:
        pieces = await unpack_pieces(source.payloads)
        decode = partial(data_uri.decode, source.header, pieces, self._decoder.max_bytes[source.modality])
        data, digest = await self._digesting.run(content_digest, decode, source.modality, options)
        digests = self._digests([Media(source.modality, digest)], settings)
        work = partial(self._decode_and_keep, data, digest, source.modality, options, settings)
        (done,) = self._find(digests) or await self._flights.run(tuple(digests), work)
        return done

    async def _process_and_keep(self, items: list[Media], settings: ProcessorSettings | None) -> list[MMItem]:
        arrays = await asyncio.gather(*(unpack(media.payload) for media in items))
        pairs = list(zip(items, arrays, strict=True))
        return self._keep(items, await self._pool.run(self._process, pairs, settings))

    async def _decode_and_keep(
        self,
        data: bytes,
        digest: str,
        modality: Modality,
        options: MediaOptions,
        settings: ProcessorSettings | None,
    ) -> list[MMItem]:
        cancelled = threading.Event()
        try:
            media, features = await self._pool.run(
                self._decode_and_process, data, digest, modality, options, settings, cancelled
            )
        finally:
            cancelled.set()
        return self._keep([media], [features])

    def _keep(self, items: list[Media], processed: list[MMFeatures]) -> list[MMItem]:
        done = []
        for media, features in zip(items, processed, strict=True):
            ms = current_call().service_ms
            logger.info("preprocessed %s: %d tokens in %.1f ms", media.modality, features.num_tokens, ms)
            done.append(MMItem(_without_arrays(media), features))
            self._cache.store(done[-1])
        return done

    def _decode_and_process(
        self,
        data: bytes,
        digest: str,
        modality: Modality,
        options: MediaOptions,
        settings: ProcessorSettings | None,
        cancelled: threading.Event,
    ) -> tuple[Media, MMFeatures]:
        with span("decode"):
            media, arrays = self._decoder.decode(data, digest, modality, options, cancelled, self._canvas)
        (features,) = self._process([(media, arrays)], settings)
        return media, features

    @traced("preprocess")
    def _process(
        self, items: list[tuple[Media, Arrays]], settings: ProcessorSettings | None
    ) -> list[MMFeatures]:
        processor = self._idle.get()
        try:
            return [each.record(pack(each.features)) for each in processor.process(items, settings)]
        finally:
            self._idle.put(processor)


def _without_arrays(media: Media) -> Media:
    return replace(media, payload=None, previews=[], uuid=None)
