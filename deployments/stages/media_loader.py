"""The media stage: fetches and decodes items into pixels, samples and frames."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from deployments.media import data_uri
from deployments.media.audio import AudioLimits
from deployments.media.decoder import Decoder, content_digest, silence_pillow
from deployments.media.fetch import Fetched, Fetcher
from deployments.media.http_cache import HttpCache
from deployments.media.image import PILLOW_MAX_PIXELS, ImageLimits
from deployments.media.local_files import read_file
from deployments.media.urls import UrlPolicy
from deployments.media.video import VideoLimits
from deployments.runtime.call_record import current_call
from deployments.runtime.lru_cache import CountingLRUCache
from deployments.runtime.payload import pack, unpack_pieces
from deployments.runtime.pool import WorkPool
from deployments.runtime.single_flight import SingleFlight
from deployments.runtime.tracing import span, traced
from deployments.stages.base import CacheStats, Stage, StageConfig, endpoint
from deployments.types import Activity, Media, MediaOptions, MediaSource, Modality

logger = logging.getLogger("ray.serve")

MIB = 2**20
MAX_REMEMBERED = 10_000  # records of what was decoded before


_IMAGE, _AUDIO, _VIDEO = ImageLimits(), AudioLimits(), VideoLimits()


class MediaLoaderConfig(StageConfig):
    threads: int = Field(default=4, ge=1, description="Items that a replica decodes at once.")
    niceness: int = Field(
        default=19,
        ge=0,
        le=19,
        description="Scheduling priority of these threads, from 0 (normal) to 19 (lowest).",
    )

    allowed_media_domains: list[str] = Field(
        default_factory=list, description="Hosts that media may be fetched from. Empty: every public host."
    )
    allowed_private_networks: list[str] = Field(
        default_factory=list,
        description="Networks (CIDR) that media may be fetched from although they are not public.",
    )
    allowed_local_media_path: str = Field(
        default="", description="Folder below which `file:` URLs may read. Empty: `file:` URLs are refused."
    )
    max_redirects: int = Field(
        default=5, ge=0, description="Redirects of one fetch. Each target is checked like the first URL."
    )
    connections_per_host: int = Field(
        default=8, ge=1, description="Connections of one replica to one media host at a time."
    )
    cache_bytes: int = Field(
        default=256 * MIB,
        ge=0,
        description="Fetched media that a replica keeps as long as their hosts allow it, in bytes. 0: none.",
    )

    max_image_bytes: int = Field(
        default=256 * MIB, gt=0, description="Largest encoded size of an image, in bytes."
    )
    max_audio_bytes: int = Field(
        default=25 * MIB, gt=0, description="Largest encoded size of a sound, in bytes."
    )
    max_video_bytes: int = Field(
        default=256 * MIB, gt=0, description="Largest encoded size of a video, in bytes."
    )
    image_fetch_timeout_s: float = Field(
        default=5.0, gt=0, description="Time for fetching an image, in seconds."
    )
    audio_fetch_timeout_s: float = Field(
        default=10.0, gt=0, description="Time for fetching a sound, in seconds."
    )
    video_fetch_timeout_s: float = Field(
        default=30.0, gt=0, description="Time for fetching a video, in seconds."
    )

    max_image_pixels: int = Field(
        default=_IMAGE.max_pixels,
        gt=0,
        le=PILLOW_MAX_PIXELS,
        description="Largest width times height of an image. It is read from the header before decoding.",
    )
    max_image_decoded_bytes: int = Field(
        default=_IMAGE.max_decoded_bytes,
        gt=0,
        description="Largest decoded size of an image, in bytes: 4 for each pixel, 7 for JPEG and TIFF, 9 for"
        " WebP and ICO, 11 for AVIF and HEIC.",
    )
    max_audio_seconds: float = Field(
        default=_AUDIO.max_seconds, gt=0, description="Longest duration of a sound, in seconds."
    )
    max_audio_decoded_bytes: int = Field(
        default=_AUDIO.max_decoded_bytes,
        gt=0,
        description="Largest decoded size of a sound as float32, in bytes, at its own rate or the model's. It"
        " is checked while decoding.",
    )
    max_video_seconds: float = Field(
        default=_VIDEO.max_seconds, gt=0, description="Longest duration of a video, in seconds."
    )
    max_video_frames: int = Field(
        default=_VIDEO.max_frames,
        gt=0,
        description="Most frames in a video file, of which the model sees a few.",
    )
    max_video_pixels: int = Field(
        default=_VIDEO.max_pixels, gt=0, description="Largest width times height of a video frame."
    )
    max_video_decoded_bytes: int = Field(
        default=_VIDEO.max_decoded_bytes,
        gt=0,
        description="Largest decoded size of the frames that the model sees, in bytes.",
    )
    video_threads: int = Field(
        default=_VIDEO.threads, ge=1, description="Threads of the video decoder for each video."
    )

    @model_validator(mode="after")
    def _check_networks(self) -> Self:
        _ = self.policy  # raises ValueError for an invalid network
        return self

    @property
    def policy(self) -> UrlPolicy:
        return UrlPolicy.of(self.allowed_media_domains, self.allowed_private_networks)

    @property
    def decoder(self) -> Decoder:
        return Decoder(
            ImageLimits(self.max_image_pixels, self.max_image_decoded_bytes),
            AudioLimits(self.max_audio_seconds, self.max_audio_decoded_bytes),
            VideoLimits(
                self.max_video_seconds,
                self.max_video_frames,
                self.max_video_pixels,
                self.max_video_decoded_bytes,
                self.video_threads,
            ),
            {modality: getattr(self, f"max_{modality}_bytes") for modality in Modality},
        )

    def fetch_timeout_s(self, modality: Modality) -> float:
        return float(getattr(self, f"{modality}_fetch_timeout_s"))


class MediaLoader(Stage):
    """Fetches and decodes one item at a time. Concurrent requests for the same URL share the work."""

    def __init__(self, config: MediaLoaderConfig) -> None:
        super().__init__(config)
        silence_pillow()
        root = config.allowed_local_media_path
        if root and not Path(root).is_dir():  # not checked in the config, which another machine may read
            raise ValueError("media_loader.allowed_local_media_path is not a folder on MediaLoader's machine")
        self._config = config
        self._decoder = config.decoder
        self._pool = WorkPool(config.threads, config.niceness)
        self._by_url: SingleFlight[Media] = SingleFlight()
        self._by_content: SingleFlight[Media] = SingleFlight()
        self._policy = config.policy
        self._cache = HttpCache(config.cache_bytes)
        self._decoded: CountingLRUCache[str, Media] = CountingLRUCache(MAX_REMEMBERED)  # without arrays
        self._fetching = self._fetched = 0  # items
        self.ready()

    async def reset_cache(self) -> None:
        self._cache.clear()
        self._decoded.clear()

    async def close(self) -> None:
        """Ends the connections and threads. Tests need it; a replica ends with its process."""
        self._pool.shutdown()
        if "_fetcher" in self.__dict__:
            await self._fetcher.close()

    @endpoint
    async def load(self, source: MediaSource, options: MediaOptions) -> Media:
        """Returns the decoded item.

        The arrays are left out if the item was decoded here before and `options` ask for neither the arrays
        again (`decode_again`) nor previews. Raises InvalidMedia and its subclasses, FetchRefused,
        FetchFailed; RayError for lost data. Cancelling stops a fetch at once and decoding at the next frame,
        unless another request waits for the same URL.
        """
        if source.kind == "data":
            return await self._load_data(source, options)
        key = (source.modality, source.url, options)
        return await self._by_url.run(key, lambda: self._load_url(source, options))

    def _activity(self) -> list[Activity]:
        http, decoded, pool = self._cache, self._decoded, self._pool
        return [
            Activity(f"{self.name}.fetch", 0, self._fetching, self._fetched, http.hits, http.misses),
            Activity(
                f"{self.name}.decode",
                pool.queued,
                pool.in_flight,
                self.calls_done,
                decoded.hits,
                decoded.misses,
            ),
        ]

    def _caches(self) -> dict[str, CacheStats]:
        http, decoded = self._cache, self._decoded
        return {
            "http": CacheStats(http.hits, http.misses, http.evictions, self._by_url.joins, http.num_bytes),
            "decoded": CacheStats(decoded.hits, decoded.misses, decoded.evictions, self._by_content.joins),
        }

    @cached_property
    def _fetcher(self) -> Fetcher:
        # Not made in __init__: a connection pool belongs to the event loop that runs then.
        return Fetcher(
            self._policy,
            max_redirects=self._config.max_redirects,
            connections_per_host=self._config.connections_per_host,
        )

    async def _load_url(self, source: MediaSource, options: MediaOptions) -> Media:
        max_bytes = self._decoder.max_bytes[source.modality]
        if source.url[:5].lower() == "file:":
            root = self._config.allowed_local_media_path
            return await self._decode(partial(read_file, source.url, root, max_bytes), source, options)
        return await self._load_web(source, options, max_bytes)

    async def _load_web(self, source: MediaSource, options: MediaOptions, max_bytes: int) -> Media:
        """Takes the body from the HTTP cache if its host allows that, or fetches it and keeps valid media."""
        url = self._policy.check_url(source.url)  # a cached body must not bypass the policy
        start, asked_at = time.perf_counter(), self._cache.now()
        entry, is_fresh = self._cache.find(url)
        kept = partial(Fetched([entry.body]).body, max_bytes) if entry else None
        if kept and is_fresh:
            return await self._decode(kept, source, options, cached=True)
        timeout_s = self._config.fetch_timeout_s(source.modality)
        conditions = entry.conditions if entry else None
        self._fetching += 1
        try:
            with span("fetch"):
                fetched = await self._fetcher.fetch(url, max_bytes, timeout_s, conditions)
        finally:
            self._fetching -= 1
        self._fetched += 1
        current_call().fetch_ms += (time.perf_counter() - start) * 1000
        if entry and kept and fetched.not_modified:
            self._cache.renew(url, entry, fetched.headers, asked_at)
            return await self._decode(kept, source, options, cached=True)
        body = b""

        def read() -> bytes:
            nonlocal body
            body = fetched.body(max_bytes)
            return body

        media = await self._decode(read, source, options)
        if fetched.cacheable:
            self._cache.store(url, body, fetched.headers, asked_at)
        return media

    async def _load_data(self, source: MediaSource, options: MediaOptions) -> Media:
        encoded = await unpack_pieces(source.payloads)
        max_bytes = self._decoder.max_bytes[source.modality]
        read = partial(data_uri.decode, source.header, encoded, max_bytes)
        return await self._decode(read, source, options)

    async def _decode(
        self,
        read: Callable[[], bytes],
        source: MediaSource,
        options: MediaOptions,
        cached: bool = False,
    ) -> Media:
        """Decodes the encoded bytes that `read` returns; `read` also runs in a thread of the pool."""
        data, digest = await self._pool.run(content_digest, read, source.modality, options)
        if not (options.decode_again or options.previews) and (known := self._decoded.find(digest)):
            return replace(known, cached=cached)
        work = partial(self._decode_data, data, digest, source.modality, options)
        media = await self._by_content.run((digest, options.previews), work)
        self._decoded.store(digest, replace(media, payload=None, previews=[]))
        ms = current_call().service_ms
        logger.info("loaded %s: %d bytes of %s in %.1f ms", source.modality, len(data), media.mime, ms)
        return replace(media, cached=cached)

    async def _decode_data(
        self, data: bytes, digest: str, modality: Modality, options: MediaOptions
    ) -> Media:
        cancelled = threading.Event()
        try:
            return await self._pool.run(self._decode_now, data, digest, modality, options, cancelled)
        finally:
            cancelled.set()

    @traced("decode")
    def _decode_now(
        self, data: bytes, digest: str, modality: Modality, options: MediaOptions, cancelled: threading.Event
    ) -> Media:
        media, arrays = self._decoder.decode(data, digest, modality, options, cancelled)
        return replace(media, payload=pack(arrays))
