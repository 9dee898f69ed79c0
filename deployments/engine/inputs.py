"""Prompt and items joined where some items came as embeddings: every item becomes embeddings in the prompt.

The model's own `forward` encodes media only for all items of a modality at once. Here each item is encoded
alone, and what a client sent already is what encoding gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from deployments.engine.assemble import assemble, to_tensor
from deployments.engine.base import EngineItem
from deployments.errors import ServingError
from deployments.processor.normalization import as_processed
from deployments.processor.placeholders import PER_TOKEN, Span, expand
from deployments.types import SECONDS_PER_GRID, Modality, Prompt, embeds_name

# Features that models derive positions from; all others are for their encoders.
FOR_POSITIONS = frozenset({"image_grid_thw", "video_grid_thw", *SECONDS_PER_GRID}) | PER_TOKEN


def is_embedded(item: EngineItem) -> bool:
    """Whether the item came as embeddings."""
    return embeds_name(item.features.modality) in item.arrays


def embedded(model: Any, prompt: Prompt, items: Sequence[EngineItem], accepts: Set[str]) -> dict[str, Any]:
    """What `generate` takes, as `assemble` gives it, with `inputs_embeds` in the place of encoders' features.

    `inputs_embeds`: [1, n, hidden size], of the model's dtype and on its device; the others are as they are
    from `assemble`, and enough to derive the positions of every token.
    """
    inputs = for_positions(prompt, items, accepts, model.dtype)
    _, spans = expand(prompt, [item.features for item in items])
    token_ids = inputs["input_ids"][0]
    rows = model.get_input_embeddings()(token_ids.to(model.device))
    for item, span in zip(items, spans, strict=True):
        rows[places_of(model.config, item, span, token_ids)] = encode(model, item).to(rows.dtype)
    return inputs | {"inputs_embeds": rows[None]}


def encode(model: Any, item: EngineItem) -> torch.Tensor:
    """The item as embeddings, [num_tokens, hidden size], on the model's device."""
    if is_embedded(item):
        return given(item).to(model.device)
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
    rows: torch.Tensor = torch.cat(list(values)) if isinstance(values, tuple | list) else values
    rows = rows.reshape(-1, rows.shape[-1])
    if len(rows) != item.features.num_tokens:
        raise ServingError("This model's family cannot take media and embeddings together.")
    return rows


def given(item: EngineItem) -> torch.Tensor:
    """A view; of bfloat16 the array has the bits."""
    name = embeds_name(item.features.modality)
    tensor = torch.from_numpy(item.arrays[name])
    return tensor.view(torch.bfloat16) if item.features.shapes[name][1] == "bfloat16" else tensor


def for_positions(
    prompt: Prompt, items: Sequence[EngineItem], accepts: Set[str], dtype: torch.dtype
) -> dict[str, Any]:
    """As `assemble`, but only with what the positions of the tokens are derived from, on the CPU."""
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
    """Frames of sound of which Qwen's audio encoder, which halves them twice, makes so many tokens."""
    return 4 * item.features.num_tokens - 1


def places_of(config: Any, item: EngineItem, span: Span, token_ids: torch.Tensor) -> torch.Tensor:
    """Indices of the item's embeddings in the prompt."""
    places = torch.arange(span.offset, span.offset + span.length)
    if item.features.modality is None:
        return places
    return places[token_ids[places] == getattr(config, f"{item.features.modality}_token_id")]


def hidden_size(model: Any) -> int | None:
    """Of the embeddings that the model takes; None where they are not all that it takes of its inputs."""
    text = model.config.get_text_config()
    vision = getattr(model.config, "vision_config", None)
    every_layer = getattr(text, "hidden_size_per_layer_input", 0)
    some_layers = hasattr(vision, "deepstack_visual_indexes")
    return None if every_layer or some_layers else int(text.hidden_size)
