"""One media item through the checkpoint's processor, as if the processor had seen the whole conversation."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deployments.errors import InvalidMedia, MediaTooLarge, ServingError
from deployments.processor.checkpoint import placeholders_of
from deployments.processor.embed_form import embeds_forms
from deployments.processor.joining import join_rule, part
from deployments.processor.normalization import AS_BYTES, learn
from deployments.processor.pixel_layout import channels_first, without_relayout
from deployments.processor.placeholders import PER_TOKEN, run_lengths
from deployments.processor.settings import ProcessorSettings, as_kwargs, settings_of
from deployments.runtime.hashing import digest
from deployments.types import (
    Affixes,
    Arrays,
    InputSpec,
    Media,
    MediaOptions,
    MMFeatures,
    Modality,
    Normalization,
    Payload,
)

MIN_AUDIO_S = 0.3  # shorter clips are padded with silence: the encoders make no token of them
DEFAULT_FPS = 2.0  # frames a second of video, where the checkpoint says neither that nor a number of frames

_KWARGS = {Modality.IMAGE: "images_kwargs", Modality.AUDIO: "audio_kwargs", Modality.VIDEO: "videos_kwargs"}
_OFFSETS = "text_replacement_offsets"  # transformers' name for what took the placeholders' places


@dataclass(frozen=True, slots=True)
class Processed:
    modality: Modality
    token_ids: list[int]  # replace the placeholder
    num_tokens: int  # so many of them are positions that embeddings fill
    features: Arrays
    affixes: Affixes
    digest: str  # of all that shaped this
    family: str  # class of the processor
    normalizations: dict[str, Normalization]  # see `MMFeatures`

    def record(self, payload: Payload | None, service_ms: float = 0.0) -> MMFeatures:
        """What other stages get, with `features` in the payload."""
        return MMFeatures(
            modality=self.modality,
            digest=self.digest,
            num_tokens=self.num_tokens,
            replacement=run_lengths(self.token_ids),
            payload=payload,
            shapes={
                name: (array.shape, "float32" if name in self.normalizations else array.dtype.name)
                for name, array in self.features.items()
            },
            service_ms=service_ms,
            affixes=self.affixes,
            family=self.family,
            normalizations=self.normalizations,
        )


class ItemProcessor:
    """One processor, for one thread at a time.

    It is called in public, on a text of nothing but the item's placeholder between the special tokens that
    the chat template puts around it. What it makes of the placeholder replaces it in the prompt; the features
    are those that one call over the whole conversation would give for this item.

    Some families treat an item otherwise when others of its modality are there. These modalities, `together`,
    are processed in one call for all items of a request.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = without_relayout(processor)
        self.family = type(processor).__name__
        self.placeholders = placeholders_of(processor)
        self.together: frozenset[Modality] = frozenset()  # set by deployments.processor.exactness
        self._normalizations: dict[Modality, dict[str, Normalization]] = {}
        seams = _seam_tokens(processor)
        self._seam_ids = frozenset(getattr(processor, "tokenizer", processor).convert_tokens_to_ids(seams))
        self._walls = {m: _walls(processor, m, token, seams) for m, token in self.placeholders.items()}
        self._settings = {m: settings_of(processor, m) for m in self.placeholders}
        self._fingerprint = _fingerprint(processor) if self.placeholders else ""

    def spec(self) -> InputSpec:
        """Of the modalities in `placeholders`."""
        return InputSpec(
            list(self.placeholders),
            _media_options(self.processor),
            settings={name: most for m in self.placeholders for name, most in self._settings[m].items()},
            together=[m for m in self.placeholders if m in self.together],
            embeds=embeds_forms(self.placeholders, lambda *item: self.process([item])[0]),
        )

    def learn_normalization(self, item: tuple[Media, Arrays]) -> None:
        """From now on this modality's features are not normalized, where that gives every bit later, too.

        `item`: has every value of a byte in each channel, after it was resized, too.
        """
        modality = item[0].modality
        *_, exact = self._call(modality, [item], {}, as_bytes=False)
        *_, raw = self._call(modality, [item], {}, as_bytes=True)
        self._normalizations[modality] = learn(exact, raw)

    def forget_normalization(self, modality: Modality) -> None:
        self._normalizations.pop(modality, None)

    def process(
        self, items: Sequence[tuple[Media, Arrays]], settings: ProcessorSettings | None = None
    ) -> list[Processed]:
        """`items` of one modality, in one call of the processor; their arrays are only read.

        Raises InvalidMedia, MediaTooLarge, or ServingError for all of a family.
        """
        modality = items[0][0].modality
        own = self._own(modality, settings)
        normalizations = self._normalizations.get(modality, {})
        replacements, text_ids, arrays = self._call(modality, items, own, as_bytes=bool(normalizations))
        digests = self.digests([media for media, _ in items], own)
        processed = []
        for index, core in enumerate(self._cores(modality, text_ids, len(items))):
            token_ids = text_ids[core]
            features = {
                name: array[:, core]
                if name in PER_TOKEN
                else part(array, join_rule(self.family, name), index, len(items))
                for name, array in arrays.items()
            }
            affixes = self._affixes(replacements[index], token_ids)
            num_tokens = self._num_tokens(token_ids)
            processed.append(
                Processed(
                    modality,
                    token_ids,
                    num_tokens,
                    features,
                    affixes,
                    digests[index],
                    self.family,
                    normalizations,
                )
            )
        return processed

    def digests(self, items: Sequence[Media], settings: ProcessorSettings | None = None) -> list[str]:
        """Of each item: over all that shapes what `process` makes of it."""
        modality = items[0].modality
        own = self._own(modality, settings)
        contents = [media.digest for media in items]
        shaping = (modality, self._fingerprint, repr(sorted(own.items())), *contents)
        return [digest(*shaping, str(place)) for place in range(len(items))]

    def _own(self, modality: Modality, settings: ProcessorSettings | None) -> ProcessorSettings:
        """Those of a request's settings that concern this modality."""
        return {k: v for k, v in (settings or {}).items() if k in self._settings[modality]}

    def _call(
        self,
        modality: Modality,
        items: Sequence[tuple[Media, Arrays]],
        settings: ProcessorSettings,
        as_bytes: bool,
    ) -> tuple[list[str], list[int], Arrays]:
        """What replaced each placeholder, the token ids of all, and the features."""
        before, after = self._walls[modality]
        arguments = _AS_ARGUMENTS[modality](self.processor, items)
        kwargs = arguments[_KWARGS[modality]]
        kwargs |= as_kwargs(self.processor, modality, settings) | (AS_BYTES if as_bytes else {})
        kwargs["return_tensors"] = "pt"
        unit = before + self.placeholders[modality] + after
        try:
            answer = self.processor(
                text=[self._between.join([unit] * len(items))],
                text_kwargs={"add_special_tokens": False},
                return_text_replacement_offsets=True,
                **arguments,
            )
        except ValueError as error:
            raise InvalidMedia(
                f"The model's processor refuses this {modality}: {_in_words(error)}"
            ) from error
        # Not `return_tensors` for all: some processors would make tensors of the offsets, too.
        values = dict(answer.convert_to_tensors("pt", skip_tensor_conversion=[_OFFSETS]))
        replacements = [offset["replacement"] for offset in values.pop(_OFFSETS)[0]]
        text_ids: list[int] = values.pop("input_ids")[0].tolist()
        values.pop("attention_mask", None)
        return replacements, text_ids, {name: np.ascontiguousarray(value) for name, value in values.items()}

    @property
    def _between(self) -> str:
        """Stands between several items: a token that belongs to none of them."""
        special = self.processor.tokenizer.special_tokens_map
        token: str = special.get("eos_token") or special.get("pad_token") or ""
        return token

    def _cores(self, modality: Modality, text_ids: list[int], count: int) -> list[slice]:
        """Of each item, from the first to the last token at which the tokenizer always splits."""
        before, after = self._walls[modality]
        ends = [len(text_ids)]
        if count > 1:
            between = self.processor.tokenizer.convert_tokens_to_ids(self._between)
            ends = [i for i, token_id in enumerate(text_ids) if token_id == between] + ends
        cores, start = [], 0
        for end in ends:
            inner = range(start + bool(before), end - bool(after))
            first = next((i for i in inner if text_ids[i] in self._seam_ids), None)
            last = next((i for i in reversed(inner) if text_ids[i] in self._seam_ids), None)
            if first is None or last is None:
                raise InvalidMedia(
                    f"This {modality} is too short or too small for the model to make anything of it."
                )
            cores.append(slice(first, last + 1))
            start = end + 1
        return cores

    def _affixes(self, replacement: str, token_ids: list[int]) -> Affixes:
        first, last = self.processor.tokenizer.convert_ids_to_tokens([token_ids[0], token_ids[-1]])
        head, found, _ = replacement.partition(first)
        _, found_too, tail = replacement.rpartition(last)
        if not found or not found_too:
            raise ServingError(f"Media of this model's family ({self.family}) cannot be served yet.")
        return head, tail

    def _num_tokens(self, token_ids: list[int]) -> int:
        """Of what a family wraps around them, the positions of embeddings are the most."""
        counts = Counter(token_ids).items()
        return max(count for token_id, count in counts if token_id in self._seam_ids)


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
    except (TemplateError, TypeError):  # one that wants strings
        return "", ""
    left, _, right = rendered.partition(placeholder)
    before = next((token for token in seams if left.endswith(token)), "")
    after = next((token for token in seams if right.startswith(token)), "")
    return before, after


def _fingerprint(processor: Any) -> str:
    import transformers

    backend = getattr(processor, "tokenizer", processor).backend_tokenizer
    kwargs = (repr(getattr(processor, name, None)) for name in (*_KWARGS.values(), "text_kwargs"))
    return digest(transformers.__version__, processor.to_json_string(), backend.to_str(), *kwargs)


def _image(processor: Any, items: Sequence[tuple[Media, Arrays]]) -> dict[str, Any]:
    # The layout is told, not guessed: an image three pixels high looks like one with the channels first.
    return {
        "images": [[arrays["pixels"] for _, arrays in items]],
        "images_kwargs": {"input_data_format": "channels_last"},
    }


def _audio(processor: Any, items: Sequence[tuple[Media, Arrays]]) -> dict[str, Any]:
    extractor = _audio_processor(processor)
    rate = extractor.sampling_rate
    window = _window(processor, extractor)
    sounds = []
    for _, arrays in items:
        samples = arrays["samples"]
        if missing := max(0, round(MIN_AUDIO_S * rate) - len(samples)):
            samples = np.pad(samples, (0, missing))
        # Extractors cut what is longer than their window without a word.
        if window and len(samples) > window:
            raise MediaTooLarge(
                f"This audio is {len(samples) / rate:.1f} s long; the model takes at most"
                f" {window / rate:g} s."
            )
        sounds.append(samples)
    return {"audio": sounds, "audio_kwargs": {"sampling_rate": rate}}


def _window(processor: Any, extractor: Any) -> int | None:
    """Samples after which the extractor cuts; None where it does not."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(extractor.__call__).parameters.items()
    }
    kwargs = defaults | dict(getattr(processor, "audio_kwargs", {}))
    if not kwargs.get("truncation"):
        return None
    window = kwargs.get("max_length") or getattr(extractor, "n_samples", None)
    return int(window) if window else None


def _video(processor: Any, items: Sequence[tuple[Media, Arrays]]) -> dict[str, Any]:
    metadata = [media.video_metadata for media, _ in items]
    kwargs: dict[str, Any] = {
        "do_sample_frames": False,  # the frames have been chosen when the clip was decoded
        "video_metadata": [metadata],
        "input_data_format": "channels_first",
    }
    if "video_second_per_grid" in processor.model_input_names:
        # Omni processors take the rate from here instead of the metadata, one for all.
        (only,) = metadata
        assert only is not None
        kwargs["fps"] = len(only["frames_indices"]) / only["total_num_frames"] * only["fps"]
    return {"videos": [[channels_first(arrays["frames"]) for _, arrays in items]], "videos_kwargs": kwargs}


_AS_ARGUMENTS: dict[Modality, Callable[[Any, Sequence[tuple[Media, Arrays]]], dict[str, Any]]] = {
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
