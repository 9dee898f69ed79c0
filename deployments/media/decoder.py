"""Decodes one item's file into arrays, for `MediaLoader`, or for `MMPreprocessor` if it came with the
request.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from PIL import Image

from deployments.media import audio, image, video
from deployments.media.audio import AudioLimits
from deployments.media.image import Canvas, ImageLimits
from deployments.media.previews import previews
from deployments.media.video import VideoLimits
from deployments.runtime import hashing
from deployments.types import Arrays, Media, MediaOptions, Modality


def content_digest(read: Callable[[], bytes], modality: Modality, options: MediaOptions) -> tuple[bytes, str]:
    """Returns the encoded bytes, and the digest of them and of all options that shape their decoding."""
    shaping: tuple[object, ...]
    match modality:
        case Modality.IMAGE:
            shaping = (options.background,)
        case Modality.AUDIO:
            shaping = (options.sampling_rate,)
        case Modality.VIDEO:
            shaping = (options.num_frames, options.fps, options.max_duration)
    data = read()
    return data, hashing.digest(modality, data, *map(repr, shaping))


def silence_pillow() -> None:
    """Turns off Pillow's warnings about large images, which our own limits cover, and about damaged files."""
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes items within limits, which are the same in each stage that decodes."""

    image: ImageLimits
    audio: AudioLimits
    video: VideoLimits
    max_bytes: Mapping[Modality, int]  # of one item, encoded

    def decode(
        self,
        data: bytes,
        digest: str,
        modality: Modality,
        options: MediaOptions,
        cancelled: threading.Event,
        canvas: Canvas | None = None,
    ) -> tuple[Media, Arrays]:
        """Returns the item with `digest` (see `content_digest`), and its arrays.

        The arrays are valid until the next item is decoded on the same canvas.

        Raises InvalidMedia and its subclasses; DecodingCancelled soon after `cancelled` is set.
        """
        match modality:
            case Modality.IMAGE:
                limits = replace(self.image, background=options.background)
                decoded = image.decode(data, limits, cancelled, canvas)
            case Modality.AUDIO:
                decoded = audio.decode(data, options.sampling_rate, self.audio, cancelled)
            case Modality.VIDEO:
                num_frames, fps, longest = options.num_frames, options.fps, options.max_duration
                decoded = video.decode(data, num_frames, fps, self.video, cancelled, longest)
        shown = previews(modality, decoded.arrays, options.sampling_rate) if options.previews else []
        media = Media(
            modality=modality,
            digest=digest,
            payload=None,
            info=decoded.info,
            num_bytes=len(data),
            mime=decoded.mime,
            video_metadata=decoded.video_metadata,
            previews=shown,
        )
        return media, decoded.arrays
