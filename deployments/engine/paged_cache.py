"""The KV cache in blocks, and the attention that reads it.

transformers calls the attention function that a language model's config names. Ours is registered as
PAGED_ATTENTION. It writes the step's keys and values to the cache, gathers what each sequence looks at, and
calls transformers' own SDPA on that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from deployments.engine.blocks import BLOCK_SIZE, NULL_BLOCK, num_blocks_for
from deployments.engine.inputs import to_device
from deployments.engine.sequence import Chunk

PAGED_ATTENTION = "headrace_paged"
_MAX_GATHERED_TOKENS = 2**17  # that one call of SDPA may copy out of the cache


class PagedCache:
    """Keys and values of all sequences."""

    def __init__(self, model: Any, num_blocks: int) -> None:
        """`num_blocks` does not count the null block, which stays zero."""
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        # A token's keys lie next to its values: both are written, and gathered, at once.
        shape = (1 + num_blocks, BLOCK_SIZE, 2, *_kv_shape(model))
        layers = model.config.get_text_config().num_hidden_layers
        self._blocks = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(layers)]
        # All layers gather into the same memory: fresh pages would cost more than the copy.
        self._gathered = self._blocks[0].new_empty(0, *shape[1:])

    def write(self, layer_idx: int, slot_mapping: torch.Tensor, states: torch.Tensor) -> None:
        """`states`: [tokens, 2, heads, size]; `slot_mapping`: each token's slot, int64[tokens]."""
        self._blocks[layer_idx].flatten(0, 1).index_copy_(0, slot_mapping, states)

    def gather_kv(self, layer_idx: int, block_table: torch.Tensor) -> torch.Tensor:
        """Returns [rows, slots, 2, heads, size]; valid until the next call. `block_table`: [rows, blocks]."""
        if len(self._gathered) < block_table.numel():
            self._gathered = self._gathered.new_empty(2 * block_table.numel(), *self._gathered.shape[1:])
        gathered = self._gathered[: block_table.numel()]
        torch.index_select(self._blocks[layer_idx], 0, block_table.flatten(), out=gathered)
        return gathered.view(len(block_table), -1, *gathered.shape[2:])

    def zero(self, blocks: list[int]) -> None:
        """Removes NaN from the blocks. Even masked slots must be finite, since 0 times NaN is NaN."""
        for layer in self._blocks:
            layer[blocks] = 0


class PagedAttention:
    """The attention of one step: each chunk sees its own sequence up to its own tokens."""

    def __init__(self, cache: PagedCache, groups: list[list[Chunk]], slot_mapping: torch.Tensor) -> None:
        """The step's tokens are those of the groups' chunks, in order."""
        self._cache = cache
        self._slot_mapping = slot_mapping
        self._groups: list[_Group] = []
        first = 0
        for chunks in groups:
            self._groups.append(_Group(cache, chunks, first))
            first += sum(chunk.num_tokens for chunk in chunks)

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        """Maps [1, heads, tokens, size] to [1, tokens, heads, size]."""
        queries = query[0].transpose(0, 1)
        states = torch.stack((key, value))[:, 0].permute(2, 0, 1, 3)
        self._cache.write(module.layer_idx, self._slot_mapping, states)
        outputs = [group.attend(module, queries[group.tokens], settings) for group in self._groups]
        return torch.cat(outputs)[None]


def _attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    paged_attention: PagedAttention,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Is called by transformers. A step passes `paged_attention` through the model."""
    return paged_attention(module, query, key, value, settings), None


AttentionInterface.register(PAGED_ATTENTION, _attention_forward)


def group_by_length(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Groups chunks of similar length, so that a group pads little. The shortest chunks come first."""
    groups: list[list[Chunk]] = []
    longest = 0  # context in the last group
    for chunk in sorted(chunks, key=lambda chunk: (chunk.num_tokens, chunk.end)):
        longest = max(longest, chunk.end)
        group = groups[-1] if groups else []
        is_longer = group and chunk.num_tokens >= 2 * group[0].num_tokens
        if not group or is_longer or (len(group) + 1) * longest > _MAX_GATHERED_TOKENS:
            groups.append([])
            longest = chunk.end
        groups[-1].append(chunk)
    return groups


class _Group:
    """Chunks that share one call of SDPA: one row each, padded at the end to the longest chunk."""

    def __init__(self, cache: PagedCache, chunks: list[Chunk], first: int) -> None:
        """`first`: index of the first chunk's first token in the step."""
        self._cache = cache
        device = cache.device
        counts = np.array([chunk.num_tokens for chunk in chunks])
        length = int(counts.max())
        self.tokens = slice(first, first + int(counts.sum()))
        self._shape = (len(chunks), length)
        self._block_table = _block_table(chunks, device)
        self._num_slots = max(chunk.end for chunk in chunks)  # what the longest sequence looks at
        self._padding: tuple[torch.Tensor, torch.Tensor] | None = None  # token of each place; places to keep
        if counts.min() < length:
            index = np.minimum(np.arange(length), counts[:, None] - 1)  # padding repeats the last token
            starts = np.cumsum(counts) - counts
            kept = np.flatnonzero(np.arange(length) < counts[:, None])
            self._padding = (
                to_device(torch.from_numpy(starts[:, None] + index), device),
                to_device(torch.from_numpy(kept), device),
            )
        self._mask: torch.Tensor | None = None
        if length > 1 or min(chunk.end for chunk in chunks) < self._num_slots:
            self._num_slots = num_blocks_for(self._num_slots) * BLOCK_SIZE
            steps = np.array([chunk.start for chunk in chunks])[:, None] + np.arange(length)
            # [rows, 1, tokens, slots]: true if the token must not see the slot of its sequence.
            hidden = torch.from_numpy(np.arange(self._num_slots) > steps[:, None, :, None])
            # A mask that is added to the scores: each layer would have to convert a boolean one.
            self._mask = to_device(hidden, device).to(cache.dtype) * torch.finfo(cache.dtype).min

    def attend(self, module: Any, queries: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
        """Maps [tokens, heads, size] to the same shape."""
        gathered = self._cache.gather_kv(module.layer_idx, self._block_table)
        keys, values = gathered[:, : self._num_slots].transpose(1, 3).unbind(2)
        if self._padding is None:
            rows = queries.view(*self._shape, *queries.shape[1:])
        else:
            rows = queries[self._padding[0]]
        output, _ = sdpa_attention_forward(module, rows.transpose(1, 2), keys, values, self._mask, **settings)
        flat: torch.Tensor = output.flatten(0, 1)
        return flat if self._padding is None else flat[self._padding[1]]


def _block_table(chunks: list[Chunk], device: torch.device) -> torch.Tensor:
    """Returns int64[rows, blocks]: the blocks of each sequence up to its chunk's end."""
    width = num_blocks_for(max(chunk.end for chunk in chunks))
    table = np.full((len(chunks), width), NULL_BLOCK)
    for row, chunk in enumerate(chunks):
        blocks = chunk.sequence.blocks[: num_blocks_for(chunk.end)]
        table[row, : len(blocks)] = blocks
    return to_device(torch.from_numpy(table), device)


def _kv_shape(model: Any) -> tuple[int, int]:
    """Returns the number of heads and the head size of the keys (and values) in one layer."""
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    return (
        getattr(text, "num_key_value_heads", None) or heads,
        getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def bytes_per_token(model: Any) -> int:
    heads, size = _kv_shape(model)
    layers: int = model.config.get_text_config().num_hidden_layers
    return 2 * layers * heads * size * int(model.dtype.itemsize)
