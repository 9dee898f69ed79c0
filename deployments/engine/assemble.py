"""Prompt and items joined into what one call of the model takes."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch

from deployments.engine.base import EngineItem
from deployments.processor.joining import join
from deployments.processor.placeholders import PER_TOKEN
from deployments.types import Prompt

_ALWAYS = frozenset({"input_ids", "attention_mask"})


def assemble(
    prompt: Prompt, items: Sequence[EngineItem], accepts: Set[str], dtype: torch.dtype
) -> dict[str, Any]:
    """The inputs that the processor would have made of the whole conversation, on the CPU.

    `accepts`: names of the arguments of the model's `forward`; other features are left out. Tensors have a
    batch of one: `input_ids`, `attention_mask` and per-token features are int64[1, n]. Raises InvalidMedia
    where the features of several items do not join.
    """
    arrays = join(prompt, [(item.features, item.arrays) for item in items])
    for name in PER_TOKEN & accepts - arrays.keys():
        arrays[name] = np.zeros_like(arrays["input_ids"])
    return {name: to_tensor(array, dtype) for name, array in arrays.items() if name in accepts | _ALWAYS}


def to_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """Features take the model's dtype; single numbers of an item, such as seconds, keep their precision."""
    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.ndim > 1 else tensor
