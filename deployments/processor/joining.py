"""Joins a prompt and its items into the result of one processor call for the whole conversation."""

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

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Join:
    """The rule that makes one array of a feature of several items."""

    axis: int | None = 0  # concatenate along this axis; None: add the numbers up
    pad: float | None = None  # fill smaller items up with this; None: items differ only along the axis


_PADDED = Join(pad=0)

# Processor class -> feature -> rule. All other features are concatenated along their first axis.
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
    """Returns `input_ids`, `attention_mask` and per-token features, int64[1, n], and all items' features.

    Raises InvalidMedia if the features of several items cannot be joined.
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
            same, first = [array for _, _, array in having], having[0][1]
            is_new = len(same) == 1 and name in first.normalizations  # `normalize` has made a copy already
            joined[name] = same[0] if is_new else _joined(name, same, join_rule(first.family, name))
    return joined


def part(array: Array, rule: Join, index: int, count: int) -> Array:
    """The share of one of `count` items that were processed jointly. Joining all shares gives the whole."""
    if count == 1:
        return array
    if rule.axis is None:
        return array // count
    return np.array_split(array, count, rule.axis)[index]


def _joined(name: str, arrays: list[Array], rule: Join) -> Array:
    """Always copies, because arrays from the object store are read-only."""
    if rule.axis is None:
        return np.asarray(sum(arrays))
    if rule.pad is not None:
        arrays = _padded(arrays, rule.axis, rule.pad)
    try:
        return np.concatenate(arrays, rule.axis)
    except ValueError as error:
        raise InvalidMedia(
            f"This model cannot take these items in one request ({name} of different shapes)."
            " Send one at a time, or videos of equal length."
        ) from error


def _padded(arrays: list[Array], axis: int, value: float) -> list[Array]:
    largest = np.max([array.shape for array in arrays], axis=0)
    padded = []
    for array in arrays:
        missing = [(0, 0 if i == axis else n - array.shape[i]) for i, n in enumerate(largest)]
        padded.append(np.pad(array, missing, constant_values=value))
    return padded
