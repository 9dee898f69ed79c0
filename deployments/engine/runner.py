"""The model under the batched engine: encoding of single items, and steps of the language model.

A family's own `forward` hands embeddings to its language model. That is the one place where all families are
alike. So an item is encoded by that `forward` without the language model, in a thread of its own, and a step
runs the language model without the rest. Positions come from the family's own `generate` code.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from deployments.engine.base import EngineItem
from deployments.engine.blocks import BLOCK_SIZE
from deployments.engine.inputs import (
    FOR_POSITIONS,
    assemble,
    embed_indices,
    for_positions,
    is_embedded,
    sent_embeds,
    to_device,
)
from deployments.engine.paged_cache import PAGED_ATTENTION, PagedAttention, PagedCache, group_by_length
from deployments.engine.sequence import Chunk, MediaSpan, PreparedPrompt
from deployments.errors import ServingError
from deployments.processor.joining import join_rule
from deployments.processor.placeholders import expand
from deployments.types import Prompt


class Runner:
    """Runs the model. One thread may call `encode` while another one calls the rest."""

    def __init__(self, model: Any, num_blocks: int) -> None:
        self._model = model
        self._device: torch.device = model.device
        language_model = model.get_decoder()
        # A copy with a config of its own, so that the model itself keeps its usual attention.
        self._language_model = _copy_sharing_weights(language_model)
        self._language_model.config._attn_implementation = PAGED_ATTENTION
        self._embedder = _without_language_model(model.base_model, language_model)
        self._embed_tokens = model.get_input_embeddings()
        self._lm_head = model.get_output_embeddings()
        self._generate_accepts = frozenset(inspect.signature(model.forward).parameters)
        self._embedder_accepts = frozenset(inspect.signature(model.base_model.forward).parameters)
        self._cache = PagedCache(model, num_blocks)
        if self._device.type == "cpu" and model.dtype == torch.float32:
            _store_by_columns(self._embed_tokens.weight, language_model, self._lm_head)

    def prepare(self, prompt: Prompt, items: Sequence[EngineItem]) -> PreparedPrompt:
        """Raises ServingError if the items do not fit the model."""
        token_ids, spans = expand(prompt, [item.features for item in items])
        items = [_with_request_totals(item, items) for item in items]
        media = [
            MediaSpan(item, _item_key(item), span.offset) for item, span in zip(items, spans, strict=True)
        ]
        media.sort(key=lambda span: span.offset)
        inputs = for_positions(prompt, items, self._generate_accepts, self._model.dtype)
        positions = self._model._prepare_position_ids_for_generation(inputs["input_ids"], inputs)
        if positions.ndim == 2:
            return PreparedPrompt(token_ids, media, positions.numpy(), 0)
        mrope_delta = int(self._model.base_model.rope_deltas)
        # If there are four rows, the first one is for packed sequences.
        return PreparedPrompt(token_ids, media, positions[-3:, 0].numpy(), mrope_delta)

    def encode(self, item: EngineItem) -> torch.Tensor:
        """Returns the embeddings of all tokens that replace the item's placeholder, [length, hidden]."""
        embeds = self._place_sent_embeds(item) if is_embedded(item) else self._run_encoder(item)
        if not embeds.isfinite().all():
            raise ServingError(
                f"The model produced NaN or infinite embeddings for this {item.features.modality or 'text'}."
            )
        return embeds

    def _run_encoder(self, item: EngineItem) -> torch.Tensor:
        inputs = assemble(_prompt_of(item), [item], self._embedder_accepts, self._model.dtype)
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        on_device = {name: to_device(tensor, self._device) for name, tensor in inputs.items()}
        embeds: torch.Tensor = self._embedder(**on_device)[0][0]
        return embeds

    def _place_sent_embeds(self, item: EngineItem) -> torch.Tensor:
        """Joins the embeddings that the client sent with those of the wrapper tokens around them."""
        token_ids, (span,) = expand(_prompt_of(item), [item.features])
        ids = torch.tensor(token_ids)
        indices = embed_indices(self._model.config, item, span, ids)
        ids[indices] = 0  # a placeholder's id need not be in the vocabulary
        embeds: torch.Tensor = self._embed_tokens(to_device(ids, self._device))
        embeds[indices] = sent_embeds(item).to(embeds)
        return embeds

    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """Computes the chunks and writes them to the cache.

        Returns the logits after the last token of each chunk, [len(chunks), vocabulary]. All tokens pass
        the layers as one row, [1, tokens, hidden]; only attention separates the sequences.
        """
        groups = group_by_length(chunks)
        ordered = [chunk for group in groups for chunk in group]
        ends = np.cumsum([chunk.num_tokens for chunk in ordered]).tolist()
        positions = self._tensor(_positions(ordered))
        states = self._language_model(
            inputs_embeds=self._embeddings(ordered, ends),
            position_ids=positions if len(positions) > 1 else positions[0],
            use_cache=False,
            paged_attention=PagedAttention(self._cache, groups, self._tensor(_slot_mapping(ordered))),
        )[0]
        last_token = {id(chunk): end - 1 for chunk, end in zip(ordered, ends, strict=True)}
        logits: torch.Tensor = self._lm_head(states[0, [last_token[id(chunk)] for chunk in chunks]])
        return logits

    def _embeddings(self, chunks: list[Chunk], ends: list[int]) -> torch.Tensor:
        """Returns [1, tokens, hidden]. `ends`: where each chunk ends in the step."""
        ids = [token_id for chunk in chunks for token_id in _token_ids(chunk)]
        embeds: torch.Tensor = self._embed_tokens(self._tensor(np.array([ids])))
        for chunk, chunk_end in zip(chunks, ends, strict=True):
            shift = chunk_end - chunk.end  # from an index in the sequence to one in the step
            for span in chunk.spans:
                assert span.embeds is not None
                begin, end = max(span.offset, chunk.start), min(span.end, chunk.end)
                part = span.embeds[begin - span.offset : end - span.offset]
                embeds[0, shift + begin : shift + end] = part
        return embeds

    def _tensor(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self._device)

    def zero(self, blocks: list[int]) -> None:
        """Zeroes cache blocks that may hold NaN."""
        self._cache.zero(blocks)


def _copy_sharing_weights(module: Any, replaced: dict[int, Any] | None = None) -> Any:
    """Copies the module tree and its configs, but no weights.

    `replaced`: by the id of an object, what the copy has in its place.
    """
    weights = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    return copy.deepcopy(module, {**weights, **(replaced or {})})


def _without_language_model(base_model: Any, language_model: Any) -> Any:
    """Returns a model on the same weights whose output is the input embeddings of its language model."""

    def forward(inputs_embeds: torch.Tensor, **_: object) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)

    # A copy of the language model, since families ask it for its embedding table and its config.
    stub = copy.copy(language_model)
    stub.forward = forward
    return _copy_sharing_weights(base_model, {id(language_model): stub})


def _store_by_columns(tied: torch.Tensor, *modules: torch.nn.Module) -> None:
    """Stores the weights of linear layers column by column, in place.

    With few rows torch multiplies faster by such weights. In an interleaved run with a hidden size of 896, a
    single sequence took 14 % less CPU time per token; a batch of 16 took the same, one of 64 took 6 % more.
    """
    for module in chain.from_iterable(top.modules() for top in modules):
        if isinstance(module, torch.nn.Linear) and module.weight is not tied:
            module.weight.data = module.weight.data.T.contiguous().T


def _token_ids(chunk: Chunk) -> list[int]:
    """Returns the chunk's token ids; 0 for items, whose ids need not be in the vocabulary."""
    ids = chunk.sequence.token_ids[chunk.start : chunk.end]
    for span in chunk.spans:
        begin, end = max(span.offset, chunk.start), min(span.end, chunk.end)
        ids[begin - chunk.start : end - chunk.start] = [0] * (end - begin)
    return ids


def _slot_mapping(chunks: list[Chunk]) -> npt.NDArray[np.int64]:
    """Returns the cache slot of each token of the step, int64[tokens]."""
    return np.array(
        [
            chunk.sequence.blocks[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE
            for chunk in chunks
            for index in range(chunk.start, chunk.end)
        ]
    )


def _positions(chunks: list[Chunk]) -> npt.NDArray[np.int64]:
    """Returns the positions of the step's tokens, int64[rows, 1, tokens]."""
    parts = []
    for chunk in chunks:
        prompt = chunk.sequence.prompt
        in_prompt = prompt.positions[:, chunk.start : chunk.end]
        in_answer = np.arange(max(chunk.start, chunk.sequence.num_prompt), chunk.end) + prompt.mrope_delta
        parts += [in_prompt, np.tile(in_answer, (len(in_prompt), 1))]
    return np.concatenate(parts, axis=1)[:, None]


def _prompt_of(item: EngineItem) -> Prompt:
    """Returns a prompt that is nothing but the item's placeholder."""
    return Prompt([0], [(item.features.modality, 0)])


def _with_request_totals(item: EngineItem, items: Sequence[EngineItem]) -> EngineItem:
    """Sets the features that count over all items of the request.

    LLaVA-OneVision's encoder must know the number of images: it only cuts a single one into tiles.
    """
    totals = {
        name: np.asarray(sum(other.arrays[name] for other in items if name in other.arrays))
        for name in item.arrays
        if join_rule(item.features.family, name).axis is None
    }
    return replace(item, arrays=item.arrays | totals) if totals else item


def _item_key(item: EngineItem) -> bytes:
    """Returns a key that is equal only for items with equal embeddings and positions.

    It covers the grid too, because the digest of embeddings that a client sent does not.
    """
    key = blake2b(f"{item.features.modality} {item.features.digest} ".encode(), digest_size=16)
    for name, array in sorted(item.arrays.items()):
        key.update(f"{name} {array.shape} {array.dtype} ".encode())
        if name in FOR_POSITIONS:
            key.update(np.ascontiguousarray(array).tobytes())
    return key.digest()
