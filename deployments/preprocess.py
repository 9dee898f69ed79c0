"""The preprocessing stage: one media item becomes what the model takes, by the checkpoint's own processor."""

from __future__ import annotations

import asyncio
import copy
import logging
import warnings
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from pydantic import Field

from deployments.checkpoint import load_processor
from deployments.errors import NotDecoded, StageTimeout, UnknownName, UnsupportedMedia
from deployments.exactness import only_what_is_exact
from deployments.item_processor import ItemProcessor
from deployments.logs import about
from deployments.metrics import publish, report_activity, report_cache
from deployments.multimodal.feature_cache import FeatureCache, Kept
from deployments.multimodal.settings import ProcessorSettings
from deployments.multimodal.single_flight import SingleFlight
from deployments.payload import pack, unpack
from deployments.pool import WorkPool
from deployments.release import freeze_start_up, let_go_on_error
from deployments.stage import StageConfig, begin
from deployments.tracing import served, traced
from deployments.types import Activity, Arrays, InputSpec, Media, MMBatch, MMFeatures, Name, Payload, Recalled

logger = logging.getLogger("ray.serve")


class PreprocessConfig(StageConfig):
    model: str = "tiny-omni"  # name of a bundled checkpoint, folder, or hub id
    chat_template: str = ""  # a file; empty: the checkpoint's own
    threads: int = Field(default=1, ge=1)  # items at once in a replica
    torch_threads: int = Field(default=1, ge=1)  # of torch, for each item
    niceness: int = Field(default=19, ge=0, le=19)
    cache_bytes: int = Field(default=2**30, ge=0)  # of processed items that a replica keeps; 0: none


class MMPreprocessor:
    """Runs the checkpoint's processor over one item at a time."""

    def __init__(self, config: PreprocessConfig) -> None:
        begin(self, config)
        import torch

        torch.set_num_threads(config.torch_threads)
        # Arrays from the object store are read-only. Processors read them and no more (there is a test).
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._pool = WorkPool(config.threads, config.niceness)
        first = only_what_is_exact(ItemProcessor(load_processor(config.model, config.chat_template)))
        self._spec = replace(first.spec(), caches=config.cache_bytes > 0)
        self._digests = first.digests
        self._cache = FeatureCache(config.cache_bytes)
        self._flights: SingleFlight[MMBatch] = SingleFlight()
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
        """`settings`: of the request, see `deployments.multimodal.settings`.

        Raises UnsupportedMedia, InvalidMedia, MediaTooLarge, StageTimeout, or RayError for lost arrays.
        """
        (features,) = (await self.process_together([media], settings, timeout_s)).features
        return features

    @served
    async def process_together(
        self, items: list[Media], settings: ProcessorSettings | None, timeout_s: float
    ) -> MMBatch:
        """All items of a request of one modality, in one call of the processor: see `InputSpec.together`."""
        with let_go_on_error():
            modality = items[0].modality
            if modality not in self._spec.modalities:
                raise UnsupportedMedia(f"This model does not take {modality}.")
            digests = self._digests(items, settings)
            batch = self._find(digests)
            if batch is None:
                with about(items[0].param):
                    batch = await self._share(digests, items, timeout_s, settings)
            for media in items:
                if media.name:
                    self._cache.name(media.name, _bare(media))
            self._done += len(items)
            return batch

    @served
    async def recall(self, name: Name, settings: ProcessorSettings | None = None) -> Recalled:
        """Raises UnknownName where nothing, or nothing processed with these settings, is kept by it."""
        media = self._cache.named(name)
        kept = self._cache.find(*self._digests([media], settings)) if media else None
        if kept is None:
            raise UnknownName(
                f"No {name.modality} is known by the uuid {name.uuid!r} (any more). Send it with its uuid."
            )
        self._done += 1
        return Recalled(kept.media, replace(kept.features, cached=True, service_ms=0.0))

    async def reset_cache(self) -> None:
        self._cache.clear()

    def _find(self, digests: list[str]) -> MMBatch | None:
        """All of them, or none."""
        found = [kept.features for digest in digests if (kept := self._cache.find(digest))]
        if len(found) < len(digests):
            return None
        return MMBatch([replace(features, cached=True, service_ms=0.0) for features in found], 0.0)

    async def _share(
        self, digests: list[str], items: list[Media], timeout_s: float, settings: ProcessorSettings | None
    ) -> MMBatch:
        """One piece of work for all who want the same at once."""
        if tuple(digests) not in self._flights and any(media.payload.is_left_out for media in items):
            raise NotDecoded("An item was decoded before, but is not kept in this replica.")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._flights.run(
                    tuple(digests), partial(self._process_and_keep, items, settings)
                )
        except TimeoutError:
            raise StageTimeout(f"There was no time left to preprocess this {items[0].modality}.") from None

    async def _process_and_keep(self, items: list[Media], settings: ProcessorSettings | None) -> MMBatch:
        modality = items[0].modality
        arrays = await asyncio.gather(*(unpack(media.payload) for media in items))
        pairs = list(zip(items, arrays, strict=True))
        processed, ms = await self._pool.run(self._process, pairs, settings)
        for each in processed:
            logger.info("preprocessed %s: %d tokens in %.1f ms", modality, each.num_tokens, ms)
        features = [replace(each, service_ms=ms) for each in processed]
        for media, each_features in zip(items, features, strict=True):
            self._cache.store(Kept(_bare(media), each_features))
        return MMBatch(features, ms)

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

    @traced("preprocess")
    def _process(
        self, items: list[tuple[Media, Arrays]], settings: ProcessorSettings | None
    ) -> list[MMFeatures]:
        processor = self._idle.get()
        try:
            return [each.record(pack(each.features)) for each in processor.process(items, settings)]
        finally:
            self._idle.put(processor)


def _bare(media: Media) -> Media:
    return replace(media, payload=Payload(0), previews=[], name=None, param="")
