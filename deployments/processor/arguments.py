"""Media as arguments of a processor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import numpy as np

from deployments.errors import MediaTooLarge
from deployments.processor.pixel_layout import channels_first
from deployments.processor.protocols import AudioExtractor, Processor
from deployments.types import Arrays, Media, MediaOptions, Modality

DecodedItem = tuple[Media, Arrays]

MIN_AUDIO_S = 0.3  # shorter clips are padded with silence: the encoders would make no token of them
DEFAULT_FPS = 2.0  # frames per second of video, if the checkpoint sets neither that nor a number of frames

# The argument for each modality's options.
KWARGS = {Modality.IMAGE: "images_kwargs", Modality.AUDIO: "audio_kwargs", Modality.VIDEO: "videos_kwargs"}

Options = dict[str, object]


def media_arguments(
    processor: Processor, modality: Modality, items: Sequence[DecodedItem]
) -> tuple[dict[str, object], Options]:
    """The media of one modality as arguments, and their options for KWARGS[modality].

    Raises MediaTooLarge for a sound that the model would cut.
    """
    return _BUILDERS[modality](processor, items)


def media_options(processor: Processor) -> MediaOptions:
    """Returns the decoding options that the processor wants."""
    video = getattr(processor, "video_processor", None)
    num_frames, fps = getattr(video, "num_frames", None), getattr(video, "fps", None)
    if num_frames is None:
        fps = fps or DEFAULT_FPS
        num_frames = getattr(video, "max_frames", None)
    sampling_rate = getattr(_audio_processor(processor), "sampling_rate", None)
    return MediaOptions(sampling_rate or 16000, num_frames, fps)


def _image(processor: Processor, items: Sequence[DecodedItem]) -> tuple[dict[str, object], Options]:
    images = [arrays["pixels"] for _, arrays in items]
    # transformers would guess the layout, and takes an image three pixels high for one with channels first.
    return {"images": [images]}, {"input_data_format": "channels_last"}


def _audio(processor: Processor, items: Sequence[DecodedItem]) -> tuple[dict[str, object], Options]:
    extractor = _audio_processor(processor)
    assert extractor is not None
    rate = extractor.sampling_rate
    window = _window(processor, extractor)
    sounds = []
    for _, arrays in items:
        samples = arrays["samples"]
        if missing := max(0, round(MIN_AUDIO_S * rate) - len(samples)):
            samples = np.pad(samples, (0, missing))
        # Extractors silently cut what is longer than their window.
        if window and len(samples) > window:
            raise MediaTooLarge(
                f"This audio is {len(samples) / rate:.1f} s long; the model takes at most"
                f" {window / rate:g} s. Send a shorter clip."
            )
        sounds.append(samples)
    return {"audio": sounds}, {"sampling_rate": rate}


def _window(processor: Processor, extractor: AudioExtractor) -> int | None:
    """The number of samples after which the extractor cuts; None if it does not cut."""
    parameters = inspect.signature(extractor.__call__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    kwargs = defaults | dict(getattr(processor, "audio_kwargs", {}))
    if not kwargs.get("truncation"):
        return None
    window = kwargs.get("max_length") or getattr(extractor, "n_samples", None)
    return int(window) if window else None


def _video(processor: Processor, items: Sequence[DecodedItem]) -> tuple[dict[str, object], Options]:
    metadata = [media.video_metadata for media, _ in items]
    options: Options = {
        "do_sample_frames": False,  # the frames were chosen when the clip was decoded
        "video_metadata": [metadata],
        "input_data_format": "channels_first",
    }
    if "video_second_per_grid" in processor.model_input_names:
        # Omni processors take one rate for all videos from here, and ignore the metadata.
        (only,) = metadata
        assert only is not None
        options["fps"] = len(only["frames_indices"]) / only["total_num_frames"] * only["fps"]
    return {"videos": [[channels_first(arrays["frames"]) for _, arrays in items]]}, options


_BUILDERS: dict[Modality, Callable[[Processor, Sequence[DecodedItem]], tuple[dict[str, object], Options]]] = {
    Modality.IMAGE: _image,
    Modality.AUDIO: _audio,
    Modality.VIDEO: _video,
}


def _audio_processor(processor: Processor) -> AudioExtractor | None:
    return getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
