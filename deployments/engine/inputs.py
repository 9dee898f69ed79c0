"""Inputs of the model: a prompt and its items joined, and single items as embeddings.

`assemble` gives `generate` the raw features of all items; the model's own `forward` runs the encoders. That
cannot mix media and embeddings that a client sent. `embedded` can: it encodes each item alone and places its
embeddings in the prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deployments.engine.base import EngineItem
from deployments.errors import ServingError
from deployments.processor.joining import join
from deployments.processor.normalization import as_processed
from deployments.processor.placeholders import PER_TOKEN, Span, expand
from deployments.types import SECONDS_PER_GRID, Modality, Prompt, embeds_name

_ALWAYS = frozenset({"input_ids", "attention_mask"})

# Features from which models derive positions. All others are for the encoders.
FOR_POSITIONS = frozenset({"image_grid_thw", "video_grid_thw", *SECONDS_PER_GRID}) | PER_TOKEN


def assemble(
    prompt: Prompt, items: Sequence[EngineItem], accepts: Set[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns the inputs that the processor would have made of the whole conversation, on the CPU.

    `accepts`: names of the arguments of the model's `forward`; other features are left out. Tensors have a
    batch of one: `input_ids`, `attention_mask` and per-token features are int64[1, n]. Raises InvalidMedia
    if the features of several items do not join.
    """
    arrays = join(prompt, [(item.features, item.arrays) for item in items])
    for name in PER_TOKEN & accepts - arrays.keys():
        arrays[name] = np.zeros_like(arrays["input_ids"])
    return {name: to_tensor(array, dtype) for name, array in arrays.items() if name in accepts | _ALWAYS}


def to_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Converts features to the model's dtype. Single numbers of an item (seconds) keep their precision."""
    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.ndim > 1 else tensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to a GPU from pinned memory, so that the thread need not wait for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def is_embedded(item: EngineItem) -> bool:
    """True if the client sent the item as embeddings."""
    return embeds_name(item.features.modality) in item.arrays


def embedded(
    model: Any, prompt: Prompt, items: Sequence[EngineItem], accepts: Set[str]
) -> dict[str, torch.Tensor]:
    """Returns inputs of `generate` with `inputs_embeds` instead of the features for encoders.

    `inputs_embeds`: [1, n, hidden size], of the model's dtype and on its device. The others are as `assemble`
    gives them, and suffice to derive the position of every token.
    """
    inputs = for_positions(prompt, items, accepts, model.dtype)
    _, spans = expand(prompt, [item.features for item in items])
    token_ids = inputs["input_ids"][0]
    embeds = model.get_input_embeddings()(token_ids.to(model.device))
    for item, span in zip(items, spans, strict=True):
        embeds[embed_indices(model.config, item, span, token_ids)] = encode(model, item).to(embeds.dtype)
    return inputs | {"inputs_embeds": embeds[None]}


def encode(model: Any, item: EngineItem) -> torch.Tensor:
    """Returns the item's embeddings, [num_tokens, hidden size], on the model's device."""
    if is_embedded(item):
        return sent_embeds(item).to(model.device)
    encoder = getattr(model, f"get_{item.features.modality}_features")
    arrays = as_processed(item.features, item.arrays)
    features = {
        name: to_tensor(arrays[name], model.dtype).to(model.device)
        for name in inspect.signature(encoder).parameters
        if name in arrays
    }
    output = encoder(**features, return_dict=True)
    pooled = output.pooler_output
    values = output.last_hidden_state if pooled is None else pooled
    embeds: torch.Tensor = torch.cat(list(values)) if isinstance(values, tuple | list) else values
    embeds = embeds.reshape(-1, embeds.shape[-1])
    if len(embeds) != item.features.num_tokens:
        raise ServingError(
            "This model does not support media and embeddings in one request. Send all items as media."
        )
    return embeds


def sent_embeds(item: EngineItem) -> torch.Tensor:
    """Returns a view of the embeddings that the client sent. NumPy holds bfloat16 as its bits."""
    name = embeds_name(item.features.modality)
    tensor = torch.from_numpy(item.arrays[name])
    return tensor.view(torch.bfloat16) if item.features.shapes[name][1] == "bfloat16" else tensor


def for_positions(
    prompt: Prompt, items: Sequence[EngineItem], accepts: Set[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns the part of `assemble`'s inputs from which the positions are derived, on the CPU."""
    bare = [
        replace(item, arrays={name: array for name, array in item.arrays.items() if name in FOR_POSITIONS})
        for item in items
    ]
    inputs = assemble(prompt, bare, accepts, dtype)
    lengths = [_audio_length(item) for item in items if item.features.modality is Modality.AUDIO]
    if lengths and "audio_feature_lengths" in accepts:
        inputs["audio_feature_lengths"] = torch.tensor(lengths)
    return inputs


def _audio_length(item: EngineItem) -> int:
    """Returns a number of audio frames for which Qwen's encoder, which halves them twice, makes the item's
    tokens."""
    return 4 * item.features.num_tokens - 1


def embed_indices(config: Any, item: EngineItem, span: Span, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the indices of the prompt's tokens that the item's embeddings replace."""
    indices = torch.arange(span.offset, span.offset + span.length)
    if item.features.modality is None:
        return indices
    return indices[token_ids[indices] == getattr(config, f"{item.features.modality}_token_id")]


def hidden_size(model: Any) -> int | None:
    """Returns the size of the embeddings that the model takes.

    Returns None if embeddings are not all that it needs of an item, so that clients cannot send them.
    """
    text = model.config.get_text_config()
    vision = getattr(model.config, "vision_config", None)
    every_layer = getattr(text, "hidden_size_per_layer_input", 0)
    some_layers = hasattr(vision, "deepstack_visual_indexes")
    return None if every_layer or some_layers else int(text.hidden_size)
