"""Decodes the frames of a video that the model will see, upright, with their places in the clip.

First the clip is split into packets, which have the time of every frame. From these times the frames are
chosen, within the limits. Only then does decoding start, at the key frame before each chosen frame, so that
long gaps cost nothing. If packets and frames do not agree (damaged files, hidden frames, containers without
times), the whole clip is decoded twice: once to count its frames, and once for the chosen ones.
"""

from __future__ import annotations

import bisect
import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.stream import Disposition
from av.video.reformatter import VideoReformatter
from PIL import Image, UnidentifiedImageError

from deployments.errors import InvalidMedia, MediaTooLarge
from deployments.media.containers import Decoded, check_cancelled, container_mime, open_container, refuse
from deployments.media.guards.image_chunks import check_chunks
from deployments.media.image import MIMES, PILLOW_ERRORS, rgb_tiles
from deployments.types import Modality, VideoMetadata

RGB = npt.NDArray[np.uint8]

_NAMES = "MP4, MOV, WebM, MKV, AVI, MPEG, Ogg, or an animated GIF, WebP or PNG"
_ANIMATIONS = {b"GIF8": "GIF", b"RIFF": "WEBP", b"\x89PNG": "PNG"}
_BACKGROUND = (255, 255, 255)  # under transparent pixels
_DEFAULT_FPS = Fraction(25)  # of a clip without times
_FASTEST_MS = 10  # as in browsers, shorter frames of an animation last _SLOW_MS
_SLOW_MS = 100
# Frames that a decoder may hold besides its result: 16 references, and those that wait to be shown.
_HELD_FRAMES = 26
_RGB_BYTES = 3  # of a pixel
_ANIMATION_BYTES = 18  # of a pixel, held by Pillow and its libraries for an animation
_PROBED = 4  # multiple of the limit up to which FFmpeg may decode frames to find the sizes of the tracks


@dataclass(frozen=True, slots=True)
class VideoLimits:
    max_seconds: float = 3600.0
    max_frames: int = 500_000  # in the clip
    max_pixels: int = 2**24  # of one frame, width x height
    max_decoded_bytes: int = 2**30  # of the chosen frames together
    threads: int = 1  # of FFmpeg's decoder


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all frames, and the duration of the clip, in ticks from the first frame."""

    ticks: list[int]  # of each frame, ascending, the first is 0
    duration: int  # at least one
    tick: Fraction  # seconds

    @property
    def seconds(self) -> float:
        return float(self.duration * self.tick)

    @property
    def fps(self) -> float:
        """Average number of frames per second."""
        return float(len(self.ticks) / (self.duration * self.tick))

    def choose(
        self, num_frames: int | None, fps: float | None, max_duration: float | None = None
    ) -> list[int]:
        """Returns the indices of the chosen frames, ascending.

        They include the first frame, and the last one if there are several. With `fps`, they are uniform in
        time, else by number.
        """
        total = len(self.ticks)
        count = total if num_frames is None else min(num_frames, total)
        if fps is not None:
            seconds = self.seconds if max_duration is None else min(self.seconds, max_duration)
            count = min(count, int(seconds * fps + 1e-3))
        if count <= 1:
            return [0]
        if fps is None:
            return [(total - 1) * k // (count - 1) for k in range(count)]
        moments = [self.ticks[-1] * k // (count - 1) for k in range(count)]
        return sorted({bisect.bisect_right(self.ticks, moment) - 1 for moment in moments})

    def metadata(self, indices: list[int]) -> VideoMetadata:
        """Returns the metadata for Hugging Face's processors, which compute a frame's time as index / rate.

        At a variable rate this would be wrong by seconds. The clip is then described as one of 1000 frames
        per second, so that the times and the duration are right.
        """
        per_tick = len(self.ticks) / self.duration
        total, fps = len(self.ticks), self.fps
        described = indices
        if any(abs(tick * per_tick - index) >= 0.5 for index, tick in enumerate(self.ticks)):
            fps = 1000.0
            total = max(1, round(self.seconds * 1000))
            described = [round(self.ticks[index] * self.tick * 1000) for index in indices]
        return {"total_num_frames": total, "fps": fps, "frames_indices": described, "duration": self.seconds}


@dataclass(frozen=True, slots=True)
class _Sampling:
    num_frames: int | None
    fps: float | None
    max_duration: float | None
    limits: VideoLimits
    cancelled: threading.Event | None

    def check_cancelled(self) -> None:
        check_cancelled(self.cancelled)

    def check_count(self, count: int) -> None:
        if count > self.limits.max_frames:
            limit = self.limits.max_frames
            raise MediaTooLarge(f"The video has more than the limit of {limit} frames. Cut it.")

    def check_size(self, width: int, height: int) -> None:
        if width * height > self.limits.max_pixels:
            raise MediaTooLarge(
                f"The video's frames of {width}x{height} have more than the limit of {self.limits.max_pixels}"
                " pixels. Scale it down."
            )

    def held(self, pixel_format: Any) -> float:
        """Returns the most bytes that the decoder holds for each pixel."""
        bits = pixel_format.padded_bits_per_pixel if pixel_format else 12
        return (_HELD_FRAMES + self.limits.threads) * bits / 8 + _RGB_BYTES

    def check_bytes(self, count: int, width: int, height: int, held: float) -> None:
        """Keeps the peak, with `held` bytes for each pixel, below twice the limit."""
        limit = self.limits.max_decoded_bytes
        taken = count * width * height * _RGB_BYTES
        if taken > limit or taken + width * height * held > 2 * limit:
            raise MediaTooLarge(
                f"{count} frames of {width}x{height}, and decoding them, take more than the limit of {limit}"
                " bytes. Scale the video down or ask for fewer frames."
            )

    def choose(self, timeline: Timeline, width: int, height: int, held: float) -> list[int]:
        """Returns the indices of the chosen frames. The clip and the result are within the limits then."""
        self.check_count(len(timeline.ticks))
        self.check_size(width, height)
        if timeline.seconds > self.limits.max_seconds:
            limit = self.limits.max_seconds
            raise MediaTooLarge(f"The video is longer than the limit of {limit:g} s. Cut it.")
        indices = timeline.choose(self.num_frames, self.fps, self.max_duration)
        self.check_bytes(len(indices), width, height, held)
        return indices


def decode(
    data: bytes,
    num_frames: int | None,
    fps: float | None,
    limits: VideoLimits,
    cancelled: threading.Event | None = None,
    max_duration: float | None = None,
) -> Decoded:
    """Decodes into {"frames": uint8[T, H, W, 3]}, uniform over the clip from its first frame to its last.

    `num_frames` bounds T, and `fps` is the number of frames to keep per second. With both, the smaller number
    counts; with neither, all frames are kept. With `fps`, a clip longer than `max_duration` seconds gets no
    more frames than one of that duration. T is at least one, and at most the number of frames in the clip.

    `info` has duration_s, fps (average of the clip), num_frames (T), frame_indices, width and height.
    `video_metadata` is for Hugging Face's video processors, see Timeline.metadata. Raises UnsupportedMedia,
    InvalidMedia (damaged), and MediaTooLarge, before anything is decoded if the packets show it.
    """
    sampling = _Sampling(num_frames, fps, max_duration, limits, cancelled)
    read = _read_animation if data[:4] in _ANIMATIONS and data[8:12] != b"AVI " else _read_container
    timeline, indices, frames, mime = read(data, sampling)
    height, width = frames.shape[1:3]
    info = {
        "duration_s": timeline.seconds,
        "fps": timeline.fps,
        "num_frames": len(indices),
        "frame_indices": indices,
        "width": width,
        "height": height,
    }
    return Decoded({"frames": frames}, info, mime, timeline.metadata(indices))


# Containers, by FFmpeg


def _read_container(data: bytes, sampling: _Sampling) -> tuple[Timeline, list[int], RGB, str]:
    # FFmpeg checks `max_pixels` before it allocates a frame, whatever the header claims.
    limits = sampling.limits
    max_pixels, max_bytes = limits.max_pixels, limits.max_decoded_bytes
    with open_container(data, Modality.VIDEO, _NAMES, _PROBED * max_pixels, max_bytes) as container:
        stream = _stream(container)
        decoder = stream.codec_context
        decoder.options = {"max_pixels": str(max_pixels)}
        decoder.thread_count = sampling.limits.threads
        decoder.thread_type = "AUTO" if sampling.limits.threads > 1 else "SLICE"
        sampling.check_size(decoder.width, decoder.height)
        packets = _packets(container, stream, 2 * len(data), sampling)
        try:
            found = _by_packets(packets, stream, sampling)
        except _PacketsDisagree:
            found = _by_frames(packets, stream, sampling)
        return *found, container_mime(container, data, Modality.VIDEO)


class _PacketsDisagree(Exception):
    """The decoded frames differ from the packets' times, or the packets have none."""


def _stream(container: Any) -> Any:
    for stream in container.streams.video:
        if Disposition.attached_pic not in stream.disposition and stream.codec_context is not None:
            return stream
    raise InvalidMedia("The file does not have a video track. Send a file with a video.")


def _packets(container: Any, stream: Any, max_bytes: int, sampling: _Sampling) -> list[Any]:
    """Returns all packets of the stream in decoding order."""
    packets: list[Any] = []
    num_bytes = 0
    try:
        for packet in container.demux(stream):
            sampling.check_cancelled()
            if packet.size:
                packets.append(packet)
                num_bytes += packet.size
                sampling.check_count(len(packets))
                if num_bytes > max_bytes:  # an index may refer to the same bytes again and again
                    raise InvalidMedia("The video's index is damaged: its frames overlap. Convert the video.")
    except av.error.FFmpegError:
        pass  # the file is cut short; the packets so far may be enough
    return packets


def _by_packets(packets: list[Any], stream: Any, sampling: _Sampling) -> tuple[Timeline, list[int], RGB]:
    """Decodes the chosen frames by the packets' times. Raises _PacketsDisagree."""
    shown = [packet for packet in packets if not packet.is_discard]
    if not shown or any(packet.pts is None for packet in shown):
        raise _PacketsDisagree
    times = sorted(packet.pts for packet in shown)
    last = max(shown, key=lambda packet: packet.pts)
    timeline = _timeline(times, last.duration, stream)
    decoder = stream.codec_context
    indices = sampling.choose(timeline, decoder.width, decoder.height, sampling.held(decoder.format))
    frames = _seek_frames(decoder, packets, times, indices, sampling)
    return timeline, indices, _collect(frames, len(indices), sampling)


def _by_frames(packets: list[Any], stream: Any, sampling: _Sampling) -> tuple[Timeline, list[int], RGB]:
    """Decodes everything twice: to count the frames, and for the chosen ones."""
    decoder = stream.codec_context
    times: list[int | None] = []
    size, held = (0, 0), 0.0
    duration = 0
    for frame in _feed(decoder, packets, 0, sampling, strict=False):
        times.append(frame.pts)
        sampling.check_count(len(times))
        size, held, duration = (frame.width, frame.height), sampling.held(frame.format), frame.duration
    if not times:
        raise InvalidMedia(
            "The video is damaged or encrypted: no frame of it can be decoded. Convert it, or send another."
        )
    timeline = _timeline(times, duration, stream)
    indices = sampling.choose(timeline, *size, held)
    wanted = set(indices)
    again = _feed(decoder, packets, 0, sampling, strict=False)
    frames = (frame for index, frame in enumerate(again) if index in wanted)
    return timeline, indices, _collect(frames, len(indices), sampling)


def _timeline(times: list[Any], last_duration: int | None, stream: Any) -> Timeline:
    """Makes the timeline from `times` in the stream's time base; at a constant rate if they do not ascend."""
    rate = Fraction(stream.average_rate or stream.guessed_rate or _DEFAULT_FPS)
    if any(time is None for time in times) or any(b <= a for a, b in pairwise(times)):
        return Timeline(list(range(len(times))), len(times), 1 / rate)
    ticks = [time - times[0] for time in times]
    mean = ticks[-1] / (len(ticks) - 1) if len(ticks) > 1 else 1 / (rate * stream.time_base)
    return Timeline(ticks, ticks[-1] + max(1, last_duration or round(mean)), stream.time_base)


def _seek_frames(
    decoder: Any, packets: list[Any], times: list[int], indices: list[int], sampling: _Sampling
) -> Iterator[Any]:
    """Yields the frames at `indices` of `times`, decoding from the key frame before each.

    Raises _PacketsDisagree as soon as a frame is not the next one by the packets' times.
    """
    keys = [(p.pts, place) for place, p in enumerate(packets) if p.is_keyframe and not p.is_discard]
    keys.sort()
    frames: Iterator[Any] = iter(())
    start = -1  # place of the packet from which `frames` comes
    upcoming = 0  # index of the frame that should come next
    for index in indices:
        at = bisect.bisect_right(keys, (times[index], len(packets))) - 1
        key_time, place = keys[at] if at >= 0 else (times[0], 0)
        if start < 0 or (place > start and bisect.bisect_left(times, key_time) >= upcoming):
            frames = _feed(decoder, packets, place, sampling, strict=True)
            start, upcoming = place, bisect.bisect_left(times, key_time)
        for frame in frames:
            if frame.pts is not None and frame.pts < key_time:
                continue  # shown before the key frame, and decodable only from an earlier one
            if frame.pts != times[upcoming]:
                raise _PacketsDisagree
            upcoming += 1
            if upcoming > index:
                yield frame
                break
        else:
            raise _PacketsDisagree


def _feed(
    decoder: Any, packets: list[Any], start: int, sampling: _Sampling, *, strict: bool
) -> Iterator[Any]:
    """Yields the frames of the packets from place `start` on.

    As in any player, a packet that does not decode loses only its own frame; with `strict` it raises
    _PacketsDisagree.
    """
    if decoder.is_open:
        decoder.flush_buffers()
    for place in range(start, len(packets) + 1):
        sampling.check_cancelled()
        try:
            frames = decoder.decode(packets[place] if place < len(packets) else None)  # None: the end
        except av.error.FFmpegError:
            if strict:
                raise _PacketsDisagree from None
            continue
        yield from frames


def _collect(frames: Iterator[Any], count: int, sampling: _Sampling) -> RGB:
    """Collects all frames in one array, in the size of the first."""
    clip: RGB | None = None
    taken = 0
    reformatter = VideoReformatter()
    for frame in frames:
        sampling.check_cancelled()
        sampling.check_size(frame.width, frame.height)
        turn = frame.rotation // 90 % 4 if frame.rotation % 90 == 0 else 0  # counter-clockwise
        if clip is None:
            size = (frame.width, frame.height)
            # Again, since the header may have claimed another size.
            sampling.check_bytes(count, *size, sampling.held(frame.format))
            shape = (frame.height, frame.width) if turn % 2 == 0 else (frame.width, frame.height)
            clip = np.empty((count, *shape, 3), np.uint8)
        clip[taken] = np.rot90(_rgb(reformatter, frame, size), turn)
        taken += 1
    if clip is None or taken < count:
        raise InvalidMedia("The video is damaged and cannot be decoded. Convert it, or send another one.")
    return clip


def _rgb(reformatter: VideoReformatter, frame: Any, size: tuple[int, int]) -> RGB:
    """Returns uint8[H, W, 3] as a view of FFmpeg's memory; `to_ndarray` would copy it."""
    width, height = size
    plane: Any = reformatter.reformat(frame, width, height, "rgb24").planes[0]
    lines: RGB = np.frombuffer(plane, np.uint8).reshape(height, plane.line_size)
    return lines[:, : 3 * width].reshape(height, width, 3)


# Animated images, by Pillow: FFmpeg leaves transparency and partial frames to its caller


def _read_animation(data: bytes, sampling: _Sampling) -> tuple[Timeline, list[int], RGB, str]:
    check_chunks(data)
    try:
        with Image.open(io.BytesIO(data), formats=[_ANIMATIONS[data[:4]]]) as image:
            sampling.check_size(*image.size)
            timeline = _animation_timeline(image, sampling)
            width, height = image.size
            indices = sampling.choose(timeline, width, height, _ANIMATION_BYTES)
            clip = np.empty((len(indices), height, width, 3), np.uint8)
            for taken, index in enumerate(indices):
                sampling.check_cancelled()
                image.seek(index)
                image.load()
                for (left, top, right, bottom), tile in rgb_tiles(image, _BACKGROUND):
                    clip[taken, top:bottom, left:right] = np.asarray(tile)
            return timeline, indices, clip, MIMES[str(image.format)]
    except UnidentifiedImageError:
        refuse(data, Modality.VIDEO, _NAMES)
    except Image.DecompressionBombError:
        raise MediaTooLarge(
            f"The animation has more than the limit of {sampling.limits.max_pixels} pixels. Scale it down."
        ) from None
    except InvalidMedia:
        raise
    except PILLOW_ERRORS as error:
        raise InvalidMedia(
            "The animation is damaged or cut short and cannot be decoded. Save it again, or send another one."
        ) from error


def _animation_timeline(image: Any, sampling: _Sampling) -> Timeline:
    ticks, now = [], 0
    for index in range(getattr(image, "n_frames", 1)):
        sampling.check_cancelled()
        sampling.check_count(index + 1)
        image.seek(index)
        image.load()  # only now does WebP report the frame's duration
        ticks.append(now)
        duration = int(image.info.get("duration") or 0)
        now += duration if duration > _FASTEST_MS else _SLOW_MS
    return Timeline(ticks, now, Fraction(1, 1000))
