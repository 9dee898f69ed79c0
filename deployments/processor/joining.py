"""Prompt and items joined: what a processor would have returned for the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.errors import InvalidMedia
from deployments.processor.normalization import as_processed
from deployments.processor.placeholders import PER_TOKEN, expand
from deployments.types import Arrays, MMFeatures, Prompt


@dataclass(frozen=True, slots=True)
class Join:
    """How one feature of several items becomes one array."""

    axis: int | None = 0  # None: numbers that are added up
    pad: float | None = None  # fills up what is smaller; None: items differ along the axis alone


_PADDED = Join(pad=0)

# By processor class and feature; all others are concatenated along their first axis.
JOINS: dict[str, dict[str, Join]] = {
    "Gemma3nProcessor": {"input_features": _PADDED, "input_features_mask": _PADDED},
    "Gemma4Processor": {"input_features": _PADDED, "input_features_mask": _PADDED},
    "Idefics3Processor": {"pixel_values": Join(1, 0), "pixel_attention_mask": Join(1, 0)},
    "LlavaNextProcessor": {"pixel_values": _PADDED},
    "LlavaOnevisionProcessor": {"pixel_values": _PADDED, "batch_num_images": Join(axis=None)},
    "Phi4MultimodalProcessor": {
        "image_pixel_values": _PADDED,
        "image_attention_mask": Join(pad=1),
        "audio_input_features": _PADDED,
        "audio_attention_mask": _PADDED,
    },
    "PixtralProcessor": {"pixel_values": _PADDED},
    "SmolVLMProcessor": {"pixel_values": Join(1, 0), "pixel_attention_mask": Join(1, 0)},
}


def join_rule(family: str, name: str) -> Join:
    return JOINS.get(family, {}).get(name, Join())


def join(prompt: Prompt, items: Sequence[tuple[MMFeatures, Arrays]]) -> Arrays:
    """`input_ids`, `attention_mask` and per-token features, int64[1, n], and the features of all items.

    Raises InvalidMedia where the features of several items do not join.
    """
    items = [(features, as_processed(features, arrays)) for features, arrays in items]
    token_ids, spans = expand(prompt, [features for features, _ in items])
    joined: Arrays = {
        "input_ids": np.array([token_ids], dtype=np.int64),
        "attention_mask": np.ones((1, len(token_ids)), dtype=np.int64),
    }
    placed = sorted(zip(spans, items, strict=True), key=lambda pair: pair[0].offset)
    for name in dict.fromkeys(name for _, (_, arrays) in placed for name in arrays):
        having = [(span, features, arrays[name]) for span, (features, arrays) in placed if name in arrays]
        if name in PER_TOKEN:
            joined[name] = np.zeros_like(joined["input_ids"])
            for span, _, array in having:
                joined[name][0, span.offset : span.offset + span.length] = array[0]
        else:
            arrays, first = [array for _, _, array in having], having[0][1]
            is_own = len(arrays) == 1 and name in first.normalizations
            joined[name] = arrays[0] if is_own else _joined(name, arrays, join_rule(first.family, name))
    return joined


def part(array: npt.NDArray[Any], rule: Join, index: int, count: int) -> npt.NDArray[Any]:
    """The share of one of `count` items that were processed together: joined again they give the whole."""
    if count == 1:
        return array
    if rule.axis is None:
        return array // count
    return np.array_split(array, count, rule.axis)[index]


def _joined(name: str, arrays: list[npt.NDArray[Any]], rule: Join) -> npt.NDArray[Any]:
    """A copy in any case: what comes from the object store is read-only."""
    if rule.axis is None:
        return np.asarray(sum(arrays))
    if rule.pad is not None:
        arrays = _padded(arrays, rule.axis, rule.pad)
    try:
        return np.concatenate(arrays, rule.axis)
    except ValueError as error:
        raise InvalidMedia(
            f"This model cannot take these items together ({name} of different shapes)."
            " Send one at a time, or videos of equal length."
        ) from error


def _padded(arrays: list[npt.NDArray[Any]], axis: int, value: float) -> list[npt.NDArray[Any]]:
    largest = np.max([array.shape for array in arrays], axis=0)
    padded = []
    for array in arrays:
        missing = [(0, 0 if i == axis else n - array.shape[i]) for i, n in enumerate(largest)]
        padded.append(np.pad(array, missing, constant_values=value))
    return padded
