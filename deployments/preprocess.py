"""The preprocessing stage: one media item becomes what the model takes, by the checkpoint's own processor."""

from __future__ import annotations

import asyncio
import copy
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from deployments.checkpoint import load_processor, placeholders_of
from deployments.errors import InvalidMedia, MediaTooLarge, ServingError, StageTimeout, UnsupportedMedia
from deployments.logs import log_refusals_in_one_line
from deployments.multimodal.pixel_layout import channels_first, without_relayout
from deployments.multimodal.placeholders import PER_TOKEN, run_lengths
from deployments.payload import pack, unpack
from deployments.pool import WorkPool
from deployments.types import Arrays, InputSpec, Media, MediaOptions, MMFeatures, Modality

logger = logging.getLogger("ray.serve")

MIN_AUDIO_S = 0.3  # shorter clips are padded with silence: the encoders make no token of them
DEFAULT_FPS = 2.0  # frames a second of video, where the checkpoint says neither that nor a number of frames


class PreprocessConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = "tiny-omni"  # name of a bundled checkpoint, folder, or hub id
    threads: int = Field(default=1, ge=1)  # items at once in a replica
    torch_threads: int = Field(default=1, ge=1)  # of torch, for each item
    niceness: int = Field(default=19, ge=0, le=19)


class MMPreprocessor:
    """Runs the checkpoint's processor over one item at a time."""

    def __init__(self, config: PreprocessConfig) -> None:
        log_refusals_in_one_line()
        import torch

        torch.set_num_threads(config.torch_threads)
        # Arrays from the object store are read-only. Processors read them and no more (there is a test).
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._pool = WorkPool(config.threads, config.niceness)
        first = ItemProcessor(load_processor(config.model))
        self._spec = first.spec
        # The tokenizer inside must not be used from several threads at once: each call borrows a processor.
        self._idle: SimpleQueue[ItemProcessor] = SimpleQueue()
        self._idle.put(first)
        for _ in range(config.threads - 1):
            self._idle.put(copy.deepcopy(first))

    async def process(self, media: Media, timeout_s: float) -> MMFeatures:
        """Raises UnsupportedMedia, InvalidMedia, MediaTooLarge, StageTimeout, or RayError for lost arrays."""
        if media.modality not in self._spec.modalities:
            raise UnsupportedMedia(f"This model does not take {media.modality}.")
        try:
            async with asyncio.timeout(timeout_s):
                arrays = await unpack(media.payload)
                processed, ms = await self._pool.run(self._process, media, arrays)
                payload = await pack(processed.features)
        except TimeoutError:
            raise StageTimeout(f"There was no time left to preprocess this {media.modality}.") from None
        logger.info("preprocessed %s: %d tokens in %.1f ms", media.modality, processed.num_tokens, ms)
        return MMFeatures(
            modality=media.modality,
            digest=media.digest,
            num_tokens=processed.num_tokens,
            replacement=run_lengths(processed.token_ids),
            payload=payload,
            shapes={name: (array.shape, array.dtype.name) for name, array in processed.features.items()},
            service_ms=ms,
        )

    async def describe(self) -> InputSpec:
        return self._spec

    def _process(self, media: Media, arrays: Arrays) -> Processed:
        processor = self._idle.get()
        try:
            return processor.process(media, arrays)
        finally:
            self._idle.put(processor)


@dataclass(frozen=True, slots=True)
class Processed:
    token_ids: list[int]  # replace the placeholder
    num_tokens: int  # so many of them are positions that embeddings fill
    features: Arrays


class ItemProcessor:
    """One processor, for one thread at a time.

    It is called in public, on a text of nothing but the item's placeholder between the special tokens that
    the chat template puts around it. What it makes of the placeholder replaces it in the prompt; the features
    are those that one call over the whole conversation would give for this item.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = without_relayout(processor)
        self._tokens = placeholders_of(processor)
        self._seams = _seam_tokens(processor)
        self._walls = {m: _walls(processor, m, token, self._seams) for m, token in self._tokens.items()}
        self.spec = InputSpec(list(self._tokens), _media_options(processor))

    def process(self, media: Media, arrays: Arrays) -> Processed:
        """`arrays` are only read. Raises InvalidMedia, MediaTooLarge, or ServingError for all of a family."""
        modality = media.modality
        before, after = self._walls[modality]
        item = _AS_ARGUMENTS[modality](self._processor, media, arrays)
        try:
            answer = self._processor(
                text=[before + self._tokens[modality] + after],
                text_kwargs={"add_special_tokens": False},
                return_tensors="pt",
                **item,
            )
        except ValueError as error:
            raise InvalidMedia(
                f"The model's processor refuses this {modality}: {_in_words(error)}"
            ) from error
        values = {name: np.ascontiguousarray(value) for name, value in answer.items()}
        text_ids: list[int] = values.pop("input_ids")[0].tolist()
        values.pop("attention_mask", None)
        inner = slice(len(before) > 0, len(text_ids) - (len(after) > 0))
        self._check_seams(text_ids, before, after)
        token_ids = text_ids[inner]
        num_tokens = token_ids.count(getattr(self._processor, f"{modality}_token_id"))
        if num_tokens == 0:
            raise InvalidMedia(
                f"This {modality} is too short or too small for the model to make anything of it."
            )
        for name in PER_TOKEN & values.keys():
            values[name] = values[name][:, inner]
        return Processed(token_ids, num_tokens, values)

    def _check_seams(self, text_ids: list[int], before: str, after: str) -> None:
        """Where plain text met plain text, the ids in the prompt could be others: better none than wrong."""
        seams = self._processor.tokenizer.convert_ids_to_tokens([text_ids[0], text_ids[-1]])
        for token, wall in zip(seams, (before, after), strict=True):
            if token not in self._seams or (wall and token != wall):
                family = type(self._processor).__name__
                raise ServingError(f"Media of this model's family ({family}) cannot be served yet.")


def _seam_tokens(processor: Any) -> list[str]:
    """Tokens at which the tokenizer always splits, the longest first. Those of blanks may grow together."""
    added = getattr(processor, "tokenizer", processor).added_tokens_decoder.values()
    return sorted((token.content for token in added if not token.content.isspace()), key=len, reverse=True)


def _walls(processor: Any, modality: Modality, placeholder: str, seams: list[str]) -> tuple[str, str]:
    """The special tokens that the chat template puts right before and after an item; "" where none is."""
    from jinja2 import TemplateError

    text = {"type": "text", "text": "a"}
    try:
        rendered = processor.apply_chat_template(
            [{"role": "user", "content": [text, {"type": str(modality)}, text]}], tokenize=False
        )
    except TemplateError:
        return "", ""
    left, _, right = rendered.partition(placeholder)
    before = next((token for token in seams if left.endswith(token)), "")
    after = next((token for token in seams if right.startswith(token)), "")
    return before, after


def _image(processor: Any, media: Media, arrays: Arrays) -> dict[str, Any]:
    # The layout is told, not guessed: an image three pixels high looks like one with the channels first.
    return {"images": [arrays["pixels"]], "images_kwargs": {"input_data_format": "channels_last"}}


def _audio(processor: Any, media: Media, arrays: Arrays) -> dict[str, Any]:
    extractor = _audio_processor(processor)
    samples, rate = arrays["samples"], extractor.sampling_rate
    if missing := max(0, round(MIN_AUDIO_S * rate) - len(samples)):
        samples = np.pad(samples, (0, missing))
    # Extractors in the manner of Whisper cut what is longer than their window without a word.
    window = getattr(extractor, "n_samples", None)
    cuts = getattr(processor, "audio_kwargs", {}).get("truncation", True)
    if window and cuts and len(samples) > window:
        raise MediaTooLarge(
            f"This audio is {len(samples) / rate:.1f} s long; the model takes at most {window / rate:g} s."
        )
    return {"audio": [samples], "audio_kwargs": {"sampling_rate": rate}}


def _video(processor: Any, media: Media, arrays: Arrays) -> dict[str, Any]:
    metadata = media.video_metadata
    assert metadata is not None
    kwargs = {
        "do_sample_frames": False,  # the frames have been chosen when the clip was decoded
        "video_metadata": [metadata],
        "input_data_format": "channels_first",
    }
    if "video_second_per_grid" in processor.model_input_names:
        # Omni processors take the rate from here instead of the metadata.
        kwargs["fps"] = len(metadata["frames_indices"]) / metadata["total_num_frames"] * metadata["fps"]
    return {"videos": [channels_first(arrays["frames"])], "videos_kwargs": kwargs}


_AS_ARGUMENTS: dict[Modality, Callable[[Any, Media, Arrays], dict[str, Any]]] = {
    Modality.IMAGE: _image,
    Modality.AUDIO: _audio,
    Modality.VIDEO: _video,
}


def _media_options(processor: Any) -> MediaOptions:
    """How the processor wants media decoded."""
    video = getattr(processor, "video_processor", None)
    num_frames, fps = getattr(video, "num_frames", None), getattr(video, "fps", None)
    if num_frames is None:
        fps = fps or DEFAULT_FPS
        num_frames = getattr(video, "max_frames", None)
    extractor = _audio_processor(processor)
    return MediaOptions(getattr(extractor, "sampling_rate", None) or 16000, num_frames, fps)


def _audio_processor(processor: Any) -> Any:
    return getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)


def _in_words(error: ValueError) -> str:
    """What a person may read of an error: no paths, no reprs, no more than a sentence or two."""
    words = re.sub(r"<[^<>|]*>|(?:/[\w.-]+){2,}", "(...)", " ".join(str(error).split()))
    return words[:300].rstrip(".") + "."
