"""The model under the batched engine: one seam to every family, and a paged cache under its attention.

The seam is what a family's own `forward` hands to its language model: embeddings. So an item is encoded by
running that `forward` on the item alone with the language model left out, in a thread of its own, and a step
runs the language model alone. Positions are those that the family's own `generate` would count. Attention is
ours in a step, by a name that the language model's config has for so long.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast

from deployments.engine.assemble import assemble
from deployments.engine.base import EngineItem
from deployments.engine.blocks import BLANK, BLOCK, RESERVED
from deployments.engine.inputs import FOR_POSITIONS, for_positions, given, is_embedded, places_of
from deployments.engine.scheduler import Chunk, MediaSpan
from deployments.errors import ServingError
from deployments.processor.joining import join_rule
from deployments.processor.placeholders import expand
from deployments.types import Prompt

# Families whose answers tests/deployments/engine/test_batched_engine.py compares with `generate`.
# Text models are served in batches by what their config says of their attention.
BATCHED = frozenset(
    {
        "glm4v",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "llava_onevision",
        "ovis2",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_audio",
        "qwen2_vl",
    }
)

# What a checkpoint may ask of `generate` and the sampler does not do.
_ONLY_IN_GENERATE = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "sequence_bias",
    "suppress_tokens",
)

_ATTENTION = "headrace"  # by this name transformers calls `_attention`
_ROWS_BYTES = 64 * 2**20  # for what answers read in each step
_GATHERED = 2**17  # tokens of the cache that one call of attention may copy


def why_not(model: Any) -> str | None:
    """Why the model cannot be served in batches, or None."""
    config = model.config
    text = config.get_text_config()
    takes_text_only = text is config and model.input_modalities in ("text", ("text",))
    if not takes_text_only and config.model_type not in BATCHED:
        return f"{config.model_type} has not been tried"
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(text, "sliding_window", None)):
        return "its language model has layers without full attention"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {config._attn_implementation}"
    for name in _ONLY_IN_GENERATE:
        if getattr(model.generation_config, name, None):
            return f"its generation config has {name}"
    if not _agrees(model):
        return "its language model by itself does not answer as the whole"
    return None


@torch.inference_mode()
def _agrees(model: Any) -> bool:
    """Whether a text read in pieces gives the logits that the model's own `forward` gives."""
    runner = Runner(model, RESERVED + 2)
    token_ids, *_, positions, delta = runner.read(Prompt([1 + i for i in range(24)], []), [])
    ids = torch.tensor([token_ids], device=model.device)
    expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    text: Any = SimpleNamespace(
        number=0,
        token_ids=token_ids,
        num_prompt=24,
        positions=positions,
        delta=delta,
        blocks=[RESERVED, RESERVED + 1],
        spans=[],
    )
    ours = [runner.forward([Chunk(text, *piece)])[0] for piece in ((0, 10), (10, 23), (23, 24))]
    difference = (torch.stack(ours) - expected[[9, 22, 23]]).abs().max() / expected.abs().max()
    return bool(difference < (1e-3 if model.dtype == torch.float32 else 0.1))


class Runner:
    """Everything that touches tensors, but for sampling. For one thread, and one more for `encode`."""

    def __init__(self, model: Any, num_blocks: int) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._front = _without(model.base_model, self._decoder)
        self._embed = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._generate_accepts = frozenset(inspect.signature(model.forward).parameters)
        self._accepts = frozenset(inspect.signature(model.base_model.forward).parameters)
        self._cache = _PagedCache(model, num_blocks)
        if model.device.type == "cpu" and model.dtype == torch.float32:
            _lay_by_columns(self._embed.weight, self._decoder, self._head)

    def read(
        self, prompt: Prompt, items: Sequence[EngineItem]
    ) -> tuple[list[int], list[MediaSpan], npt.NDArray[np.int64], int]:
        """Token ids, media, positions [rows, tokens], and how far positions in the answer are ahead of the
        index of the token. Raises ServingError.
        """
        token_ids, spans = expand(prompt, [item.features for item in items])
        items = [_among(item, items) for item in items]
        media = [MediaSpan(item, _key(item), span.offset) for item, span in zip(items, spans, strict=True)]
        media.sort(key=lambda span: span.offset)
        inputs = for_positions(prompt, items, self._generate_accepts, self._model.dtype)
        positions = self._model._prepare_position_ids_for_generation(inputs["input_ids"], inputs)
        if positions.ndim == 2:
            return token_ids, media, positions.numpy(), 0
        delta = int(self._model.base_model.rope_deltas)
        # Of four rows the first counts tokens, for packed sequences.
        return token_ids, media, positions[-3:, 0].numpy(), delta

    def encode(self, item: EngineItem) -> torch.Tensor:
        """What stands in for the item's tokens in the prompt, [length, hidden]."""
        prompt = Prompt([0], [(item.features.modality, 0)])
        embeds = self._around(prompt, item) if is_embedded(item) else self._encoded(prompt, item)
        if not embeds.isfinite().all():
            raise ServingError(f"The model makes no numbers of this {item.features.modality or 'text'}.")
        return embeds

    def _encoded(self, prompt: Prompt, item: EngineItem) -> torch.Tensor:
        inputs = assemble(prompt, [item], self._accepts, self._model.dtype)
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        on_device = {name: _moved(tensor, self._model.device) for name, tensor in inputs.items()}
        embeds: torch.Tensor = self._front(**on_device)[0][0]
        return embeds

    def _around(self, prompt: Prompt, item: EngineItem) -> torch.Tensor:
        """Embeddings as sent, and those of the tokens around them."""
        token_ids, (span,) = expand(prompt, [item.features])
        ids = torch.tensor(token_ids)
        places = places_of(self._model.config, item, span, ids)
        ids[places] = 0  # theirs need not be in the vocabulary
        embeds: torch.Tensor = self._embed(_moved(ids, self._model.device))
        embeds[places] = given(item).to(embeds)
        return embeds

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits after the last token of each chunk, [len(chunks), vocabulary]; the cache is written.

        All tokens go through the layers as one row, [1, tokens, hidden]; only attention tells them apart.
        """
        device = self._model.device
        groups = self._cache.grouped(chunks)
        batch = _Batch([chunk for group in groups for chunk in group])
        positions = _on(device, batch.positions)
        with self._paged_attention():
            states = self._decoder(
                inputs_embeds=self._embeddings(batch, _on(device, batch.ids)),
                position_ids=positions if len(positions) > 1 else positions[0],
                use_cache=False,
                attention=_Attention(self._cache, groups, _on(device, batch.written)),
            )[0]
        last = {id(chunk): end - 1 for chunk, end in zip(batch.chunks, batch.ends, strict=True)}
        logits: torch.Tensor = self._head(states[0, [last[id(chunk)] for chunk in chunks]])
        return logits

    def _embeddings(self, batch: _Batch, ids: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self._embed(ids)
        for chunk, after in zip(batch.chunks, batch.ends, strict=True):
            for span in chunk.spans:
                assert span.embeds is not None
                begin, end = max(span.offset, chunk.start), min(span.end, chunk.end)
                part = span.embeds[begin - span.offset : end - span.offset]
                embeds[0, after - chunk.end + begin : after - chunk.end + end] = part
        return embeds

    def wait(self) -> None:
        """Until the device has done what it was told, for taking the time."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def clear(self, blocks: list[int]) -> None:
        """Zeros where there may be no numbers: even masked, they would spread."""
        self._cache.clear(blocks)

    @contextmanager
    def _paged_attention(self) -> Iterator[None]:
        config = self._decoder.config
        usual, config._attn_implementation = config._attn_implementation, _ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = usual


def _without(whole: Any, decoder: Any) -> Any:
    """A model on the same weights that gives the embeddings which `whole` hands to its language model."""

    def forward(inputs_embeds: torch.Tensor, **others: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)

    if whole is decoder:  # of text alone
        copied = copy.copy(decoder)
        copied.forward = forward
        return copied
    copied = copy.copy(whole)
    copied._modules = {
        name: _without(module, decoder) if _holds(module, decoder) else module
        for name, module in whole._modules.items()
    }
    return copied


def _holds(module: Any, decoder: Any) -> bool:
    return module is not None and any(each is decoder for each in module.modules())


def _lay_by_columns(tied: torch.Tensor, *modules: torch.nn.Module) -> None:
    """The weights of linear layers: few rows at a time are multiplied up to twice as fast by such."""
    for module in (each for top in modules for each in top.modules()):
        if isinstance(module, torch.nn.Linear) and module.weight is not tied:
            module.weight.data = module.weight.data.T.contiguous().T


class _Batch:
    """Chunks as the arrays of one forward, one after the other."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        self.ends: list[int] = []  # of each chunk, in the batch
        ids: list[int] = []
        written: list[int] = []  # places of the tokens in the cache
        positions: list[int] = []  # as in an answer
        for chunk in chunks:
            sequence = chunk.sequence
            steps = range(chunk.start, chunk.end)
            ids += sequence.token_ids[chunk.start : chunk.end]
            written += [sequence.blocks[step // BLOCK] * BLOCK + step % BLOCK for step in steps]
            positions += [step + sequence.delta for step in steps]
            self.ends.append(len(ids))
        self.ids = np.array([ids])
        self.written = np.array(written)
        self.positions = np.tile(np.array(positions), (len(chunks[0].sequence.positions), 1, 1))
        for chunk, end in zip(chunks, self.ends, strict=True):
            start = end - chunk.num_tokens
            for span in chunk.spans:  # their ids need not be in the vocabulary
                first = max(span.offset - chunk.start, 0)
                self.ids[0, start + first : min(start + span.end - chunk.start, end)] = 0
            if chunk.start < chunk.sequence.num_prompt:
                known = chunk.sequence.positions[:, chunk.start : chunk.end]
                self.positions[:, 0, start : start + known.shape[1]] = known


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    attention: _Attention,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """States of all tokens, [1, heads, tokens, size], as transformers hands them to what it has by a name."""
    return attention(module, query, key, value, settings), None


AttentionInterface.register(_ATTENTION, _attention)


class _Attention:
    """What the tokens of one forward look at, group by group."""

    def __init__(self, cache: _PagedCache, groups: Sequence[Sequence[Chunk]], written: torch.Tensor) -> None:
        """`written`: int64[tokens], each token's place in the cache."""
        self._cache = cache
        self._written = written
        self._groups: list[_Group] = []
        first = 0
        for chunks in groups:
            self._groups.append(_Group(cache, chunks, first))
            first += sum(chunk.num_tokens for chunk in chunks)

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Any
    ) -> torch.Tensor:
        """[1, tokens, heads, size], of [1, heads, tokens, size]."""
        tokens = query[0].transpose(0, 1)
        states = torch.stack((key, value))[:, 0].permute(2, 0, 1, 3)
        self._cache.write(module.layer_idx, self._written, states)
        if len(self._groups) == 1:
            return self._groups[0].attend(module, tokens, states, settings)[None]
        seen = [
            group.attend(module, tokens[group.tokens], states[group.tokens], settings)
            for group in self._groups
        ]
        return torch.cat(seen)[None]


class _Group:
    """Chunks of about one length, one row each, padded at the end: one call of attention."""

    def __init__(self, cache: _PagedCache, chunks: Sequence[Chunk], first: int) -> None:
        """`first`: index of the first chunk's first token in the batch."""
        self._cache = cache
        device = cache.device
        counts = [chunk.num_tokens for chunk in chunks]
        self.tokens = slice(first, first + sum(counts))  # of the batch
        length = max(counts)
        self._shape = (len(chunks), length)
        self._places = max(chunk.end for chunk in chunks)
        self._padded = self._kept = self._mask = None
        if min(counts) < length:
            index = np.minimum(np.arange(length), np.array(counts)[:, None] - 1)  # padding repeats the last
            starts = np.cumsum([0, *counts[:-1]])
            self._padded = _on(device, starts[:, None] + index)
            self._kept = _on(device, np.flatnonzero(np.arange(length) < np.array(counts)[:, None]))
        if length > 1 or min(chunk.end for chunk in chunks) < self._places:
            self._places = -(-self._places // BLOCK) * BLOCK
            steps = np.array([chunk.start for chunk in chunks])[:, None] + np.arange(length)
            # Whether a token [rows, 1, tokens] must not see a place [places] of its sequence.
            hidden = np.arange(self._places) > steps[:, None, :, None]
            # Added to the scores: each layer would have to convert a mask of bools.
            self._mask = _on(device, hidden).to(cache.dtype) * torch.finfo(cache.dtype).min
        in_rows = first == 0 and length == 1 and cache.rows.aim(chunks)
        self._table = None if in_rows else cache.table(chunks)

    def attend(
        self, module: Any, tokens: torch.Tensor, states: torch.Tensor, settings: dict[str, Any]
    ) -> torch.Tensor:
        """[tokens, heads, size], as `tokens`, the queries, are; `states`: [tokens, 2, heads, size]."""
        if self._table is None:
            read = self._cache.rows.update(module.layer_idx, states)
        else:
            read = self._cache.read(module.layer_idx, self._table)
        keys, values = read[:, : self._places].transpose(1, 3).unbind(2)
        rows = tokens.view(*self._shape, *tokens.shape[1:]) if self._padded is None else tokens[self._padded]
        seen, _ = sdpa_attention_forward(module, rows.transpose(1, 2), keys, values, self._mask, **settings)
        flat: torch.Tensor = seen.flatten(0, 1)
        return flat if self._kept is None else flat[self._kept]


class _PagedCache:
    """Blocks of keys and values for all sequences."""

    def __init__(self, model: Any, num_blocks: int) -> None:
        layers = model.config.get_text_config().num_hidden_layers
        self.device, self.dtype = model.device, model.dtype
        # A token's keys lie beside its values: both are written, and read, at once.
        shape = (num_blocks, BLOCK, 2, *kv_shape(model))
        self._blocks = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(layers)]
        self._places = [blocks.flatten(0, 1) for blocks in self._blocks]
        self._room = self._blocks[0].new_empty(0, *shape[1:])
        self.rows = _Rows(self._blocks, _ROWS_BYTES // bytes_per_token(model))

    def grouped(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Chunks of about one length together, so that little is padding. Single tokens come first."""
        groups: list[list[Chunk]] = []
        longest = 0
        for chunk in sorted(chunks, key=lambda chunk: (chunk.num_tokens, chunk.end)):
            longest = max(longest, chunk.end)
            group = groups[-1] if groups else []
            is_longer = group and chunk.num_tokens >= 2 * group[0].num_tokens
            if not group or is_longer or (len(group) + 1) * longest > _GATHERED:
                groups.append([])
                longest = chunk.end
            groups[-1].append(chunk)
        if groups[0][0].num_tokens == 1:
            groups[0] = self.rows.arranged(groups[0])
        return groups

    def table(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """int64[rows, blocks]: where to read the sequences up to their chunks' ends."""
        num_blocks = -(-max(chunk.end for chunk in chunks) // BLOCK)
        table = np.full((len(chunks), num_blocks), BLANK)
        for row, chunk in enumerate(chunks):
            blocks = chunk.sequence.blocks[: -(-chunk.end // BLOCK)]
            table[row, : len(blocks)] = blocks
        return _on(self.device, table)

    def write(self, layer_idx: int, places: torch.Tensor, states: torch.Tensor) -> None:
        """`states`: [tokens, 2, heads, size]."""
        self._places[layer_idx].index_copy_(0, places, states)

    def read(self, layer_idx: int, table: torch.Tensor) -> torch.Tensor:
        """[rows, places, 2, heads, size], until the next call."""
        # One layer after another reads into the same memory: fresh pages would cost more than the copy.
        if len(self._room) < table.numel():
            self._room = self._room.new_empty(2 * table.numel(), *self._room.shape[1:])
        read = self._room[: table.numel()]
        torch.index_select(self._blocks[layer_idx], 0, table.flatten(), out=read)
        return read.view(len(table), -1, *read.shape[2:])

    def clear(self, blocks: list[int]) -> None:
        for layer in self._blocks:
            layer[blocks] = 0
        self.rows.clear()


class _Rows:
    """Copies of what the answers' next tokens look at, one row each, kept from step to step: a step adds a
    token to each row, and copies from the blocks only whose row was another's before.
    """

    def __init__(self, blocks: list[torch.Tensor], max_tokens: int) -> None:
        self._blocks = blocks  # of each layer, [blocks, BLOCK, 2, heads, size]
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        self._layers: list[torch.Tensor] = []  # [rows, places, 2, heads, size]
        self._places: list[torch.Tensor] = []  # the same, of all rows
        self._room = (0, 0)  # rows, blocks
        self._held: list[tuple[int, int]] = []  # of each row, the number of its sequence, and tokens

    def arranged(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Who has a row stays in it."""
        rows = {number: row for row, (number, _) in enumerate(self._held[: len(chunks)])}
        staying = {rows[chunk.sequence.number]: chunk for chunk in chunks if chunk.sequence.number in rows}
        others = (chunk for chunk in chunks if chunk.sequence.number not in rows)
        return [staying.get(row) or next(others) for row in range(len(chunks))]

    def aim(self, chunks: Sequence[Chunk]) -> bool:
        """For one token of each chunk. False where there is no room for so many tokens."""
        rows, blocks = len(chunks), -(-max(chunk.end for chunk in chunks) // BLOCK)
        if rows > self._room[0] or blocks > self._room[1]:
            room = (2 ** (rows - 1).bit_length(), 2 ** (blocks - 1).bit_length())
            if room[0] * room[1] * BLOCK > self._max_tokens:
                return False
            self.clear()
            self._room = room
            # Zeros, as even masked places must be numbers.
            shape = (room[0], room[1] * BLOCK, *self._blocks[0].shape[2:])
            self._layers = [each.new_zeros(shape) for each in self._blocks]
            self._places = [layer.flatten(0, 1) for layer in self._layers]
        for row, chunk in enumerate(chunks):
            if (chunk.sequence.number, chunk.start) not in self._held[row : row + 1]:
                self._copy(chunk, row)
        self._held = [(chunk.sequence.number, chunk.end) for chunk in chunks]
        new = [row * self._room[1] * BLOCK + chunk.start for row, chunk in enumerate(chunks)]
        self._new = _on(self._blocks[0].device, np.array(new))
        return True

    def _copy(self, chunk: Chunk, row: int) -> None:
        blocks = np.array(chunk.sequence.blocks[: -(-chunk.end // BLOCK)])
        source = _on(self._blocks[0].device, blocks)
        for layer, each in zip(self._layers, self._blocks, strict=True):
            places = layer[row, : len(source) * BLOCK]
            torch.index_select(each, 0, source, out=places.view(len(source), *each.shape[1:]))

    def update(self, layer_idx: int, states: torch.Tensor) -> torch.Tensor:
        """`states`: [rows, 2, heads, size]; comes back as [rows, places, 2, heads, size] with all before."""
        self._places[layer_idx].index_copy_(0, self._new, states)
        return self._layers[layer_idx][: len(states)]


def kv_shape(model: Any) -> tuple[int, int]:
    """Heads and size of the keys (and values) of one token in one layer."""
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    return (
        getattr(text, "num_key_value_heads", None) or heads,
        getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def bytes_per_token(model: Any) -> int:
    heads, size = kv_shape(model)
    layers: int = model.config.get_text_config().num_hidden_layers
    return 2 * layers * heads * size * int(model.dtype.itemsize)


def _among(item: EngineItem, items: Sequence[EngineItem]) -> EngineItem:
    """With the sum over the request where an encoder must know it: of several images LLaVA-OneVision cuts
    none into tiles.
    """
    sums = {
        name: np.asarray(sum(other.arrays[name] for other in items if name in other.arrays))
        for name in item.arrays
        if join_rule(item.features.family, name).axis is None
    }
    return replace(item, arrays=item.arrays | sums) if sums else item


def _key(item: EngineItem) -> bytes:
    """Equal only for items that the model takes for the same: embeddings as sent say nothing of the grid."""
    key = blake2b(f"{item.features.modality} {item.features.digest} ".encode(), digest_size=16)
    for name, array in sorted(item.arrays.items()):
        key.update(f"{name} {array.shape} {array.dtype} ".encode())
        if name in FOR_POSITIONS:
            key.update(np.ascontiguousarray(array).tobytes())
    return key.digest()


def _on(device: torch.device, array: npt.NDArray[Any]) -> torch.Tensor:
    return _moved(torch.from_numpy(array), device)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From pinned memory, so that the thread goes on while the copy is under way."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
