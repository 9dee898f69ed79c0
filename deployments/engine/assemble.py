"""Prompt and items joined into what one call of the model takes."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch

from deployments.engine.base import EngineItem
from deployments.errors import ServingError
from deployments.multimodal.placeholders import PER_TOKEN, expand
from deployments.types import Arrays, Prompt


def assemble(
    prompt: Prompt, items: Sequence[EngineItem], accepts: Set[str], dtype: torch.dtype
) -> dict[str, Any]:
    """The inputs that the processor would have made of the whole conversation, on the CPU.

    `accepts`: names of the arguments of the model's `forward`; other features are left out. Tensors have a
    batch of one: `input_ids`, `attention_mask` and per-token features are int64[1, n]; features are joined
    along their first dimension, items of a modality in their order. Raises ServingError where the features
    of several items do not join.
    """
    token_ids, spans = expand(prompt, [item.features for item in items])
    arrays: Arrays = {
        "input_ids": np.array([token_ids], dtype=np.int64),
        "attention_mask": np.ones((1, len(token_ids)), dtype=np.int64),
    }
    for name in PER_TOKEN & accepts:
        types = np.zeros_like(arrays["input_ids"])
        for item, span in zip(items, spans, strict=True):
            if name in item.arrays:
                types[0, span.offset : span.offset + span.length] = item.arrays[name][0]
        arrays[name] = types
    names = dict.fromkeys(name for item in items for name in item.arrays)
    for name in names.keys() & accepts - PER_TOKEN:
        arrays[name] = _join(name, [item.arrays[name] for item in items if name in item.arrays])
    return {name: to_tensor(array, dtype) for name, array in arrays.items()}


def _join(name: str, arrays: list[Any]) -> Any:
    """A copy in any case: what comes from the object store is read-only."""
    try:
        return np.concatenate(arrays)
    except ValueError as error:
        raise ServingError(f"This model's family cannot take these items together ({name}).") from error


def to_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """Features take the model's dtype; single numbers of an item, such as seconds, keep their precision."""
    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.ndim > 1 else tensor
