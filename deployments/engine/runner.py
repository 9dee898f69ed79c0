"""The model under the batched engine: one seam to every family, and a paged cache under its attention.

The seam is what a family's own `forward` hands to its language model: embeddings. So an item is encoded by
running that `forward` on the item alone with the language model left out, and a step runs the language model
alone. Positions are those that the family's own `generate` would count.
"""

from __future__ import annotations

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
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from deployments.engine.assemble import assemble
from deployments.engine.base import EngineItem
from deployments.engine.blocks import BLANK, BLOCK, RESERVED, SINK
from deployments.engine.inputs import FOR_POSITIONS, for_positions, given, is_embedded, places_of
from deployments.engine.scheduler import Chunk, MediaSpan
from deployments.errors import ServingError
from deployments.multimodal.joining import join_rule
from deployments.multimodal.placeholders import expand
from deployments.types import Prompt

# Families of which tests/test_batched_engine.py compares the answers with `generate`. Text models are served
# in batches by what their config says of their attention.
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

_ROWS_BYTES = 64 * 2**20  # for what answers read in each step


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
        blocks=[2, 3],
        spans=[],
    )
    ours = [runner.forward([Chunk(text, *piece)])[0] for piece in ((0, 10), (10, 23), (23, 24))]
    difference = (torch.stack(ours) - expected[[9, 22, 23]]).abs().max() / expected.abs().max()
    return bool(difference < (1e-3 if model.dtype == torch.float32 else 0.1))


class Runner:
    """Everything that touches tensors, but for sampling. For one thread."""

    def __init__(self, model: Any, num_blocks: int) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._embed = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._generate_accepts = frozenset(inspect.signature(model.forward).parameters)
        self._accepts = frozenset(inspect.signature(model.base_model.forward).parameters)
        self._cache = _PagedCache(model, num_blocks)

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
        with self._without_decoder():
            embeds: torch.Tensor = self._model.base_model(**on_device)[0][0]
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

    def arranged(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """In the order that is cheapest for `forward`."""
        return self._cache.rows.arranged(chunks)

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits after the last token of each chunk, [len(chunks), vocabulary]; the cache is written."""
        batch, device = _Batch(chunks), self._model.device
        embeds = self._embeddings(chunks, _on(device, batch.ids))
        self._cache.aim(chunks, _on(device, batch.written), _on(device, batch.table))
        # Added to the scores: each layer would have to convert a mask of bools.
        mask = _on(device, batch.hidden).to(embeds.dtype) * torch.finfo(embeds.dtype).min
        positions = _on(device, batch.positions)
        states = self._decoder(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=positions if len(positions) > 1 else positions[0],
            cache=self._cache,
            use_cache=True,
        )[0]
        last = [chunk.num_tokens - 1 for chunk in chunks]
        logits: torch.Tensor = self._head(states[range(len(chunks)), last] if any(last) else states[:, 0])
        return logits

    def _embeddings(self, chunks: Sequence[Chunk], ids: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self._embed(ids)
        for row, chunk in enumerate(chunks):
            for span in chunk.spans:
                assert span.embeds is not None
                begin, end = max(span.offset, chunk.start), min(span.end, chunk.end)
                part = span.embeds[begin - span.offset : end - span.offset]
                embeds[row, begin - chunk.start : end - chunk.start] = part
        return embeds

    def wait(self) -> None:
        """Until the device has done what it was told, for taking the time."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeros where there may be no numbers: even masked, they would spread."""
        self._cache.clear([SINK, *blocks])

    @contextmanager
    def _without_decoder(self) -> Iterator[None]:
        def forward(inputs_embeds: torch.Tensor, **others: Any) -> BaseModelOutputWithPast:
            return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)

        self._decoder.forward = forward
        try:
            yield
        finally:
            del self._decoder.forward


class _Batch:
    """Chunks as the arrays of one forward, one row each, padded at the end."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        rows, length = len(chunks), max(chunk.num_tokens for chunk in chunks)
        num_blocks = -(-max(chunk.end for chunk in chunks) // BLOCK)
        self.ids = np.zeros((rows, length), np.int64)
        self.positions = np.zeros((len(chunks[0].sequence.positions), rows, length), np.int64)
        self.written = np.full((rows, length), SINK * BLOCK, np.int64)  # places of the tokens in the cache
        self.table = np.full((rows, num_blocks), BLANK, np.int64)  # blocks that hold the row's sequence
        index = np.zeros((rows, length), np.int64)  # of each token in its sequence
        for row, chunk in enumerate(chunks):
            sequence, start, end, n = chunk.sequence, chunk.start, chunk.end, chunk.num_tokens
            index[row, :n] = steps = np.arange(start, end)
            self.ids[row, :n] = sequence.token_ids[start:end]
            for span in chunk.spans:  # their ids need not be in the vocabulary
                self.ids[row, max(span.offset - start, 0) : span.end - start] = 0
            self.positions[:, row, :n] = steps + sequence.delta
            if start < sequence.num_prompt:
                known = sequence.positions[:, start:end]
                self.positions[:, row, : known.shape[1]] = known
            blocks = sequence.blocks[: -(-end // BLOCK)]
            self.table[row, : len(blocks)] = blocks
            self.written[row, :n] = self.table[row, steps // BLOCK] * BLOCK + steps % BLOCK
        # Whether a token [rows, 1, tokens] must not see a place [places] of its sequence.
        self.hidden = np.arange(num_blocks * BLOCK) > index[:, None, :, None]


class _PagedCache(Cache):  # type: ignore[misc]
    """Blocks of keys and values for all sequences; `aim` says which tokens the next forward is about."""

    def __init__(self, model: Any, num_blocks: int) -> None:
        super().__init__(layers=[])
        layers = model.config.get_text_config().num_hidden_layers
        # A token's keys lie beside its values: both are written, and read, at once.
        shape = (num_blocks, BLOCK, 2, *kv_shape(model))
        self._blocks = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(layers)]
        self._places = [blocks.flatten(0, 1) for blocks in self._blocks]
        self._room = self._blocks[0].new_empty(0, *shape[1:])
        self.rows = _Rows(self._blocks, _ROWS_BYTES // bytes_per_token(model))

    def aim(self, chunks: Sequence[Chunk], written: torch.Tensor, table: torch.Tensor) -> None:
        """`written`: int64[rows, tokens], each new token's place; `table`: int64[rows, blocks] to read."""
        self._written = written.flatten()
        self._in_rows = written.shape[1] == 1 and self.rows.aim(chunks, table)
        if self._in_rows:
            return
        self._num_rows, self._table = len(table), table.flatten()
        # One layer after another reads into the same memory: fresh pages would cost more than the copy.
        if len(self._room) < len(self._table):
            self._room = self._room.new_empty(2 * len(self._table), *self._room.shape[1:])
        self._read = self._room[: len(self._table)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New states [rows, heads, tokens, size] go into the cache; what the rows may look at comes out."""
        states = torch.stack((key_states.transpose(1, 2), value_states.transpose(1, 2)), dim=2).flatten(0, 1)
        self._places[layer_idx].index_copy_(0, self._written, states)
        if self._in_rows:
            read = self.rows.update(states, layer_idx)
        else:
            torch.index_select(self._blocks[layer_idx], 0, self._table, out=self._read)
            read = self._read.view(self._num_rows, -1, *self._read.shape[2:])
        keys, values = read.transpose(1, 3).unbind(2)
        return keys, values

    def clear(self, blocks: list[int]) -> None:
        for layer in self._blocks:
            layer[blocks] = 0
        self.rows.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # masks and positions are given


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
        self._room = (0, 0)  # rows, places
        self._held: list[tuple[int, int]] = []  # of each row, the number of its sequence, and tokens

    def arranged(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Who has a row stays in it."""
        rows = {number: row for row, (number, _) in enumerate(self._held[: len(chunks)])}
        staying = {rows[chunk.sequence.number]: chunk for chunk in chunks if chunk.sequence.number in rows}
        others = (chunk for chunk in chunks if chunk.sequence.number not in rows)
        return [staying.get(row) or next(others) for row in range(len(chunks))]

    def aim(self, chunks: Sequence[Chunk], table: torch.Tensor) -> bool:
        """For one token of each chunk. False where there is no room for so many tokens."""
        rows, places = len(table), table.shape[1] * BLOCK
        if rows > self._room[0] or places > self._room[1]:
            room = (2 ** (rows - 1).bit_length(), 2 ** (places - 1).bit_length())
            if room[0] * room[1] > self._max_tokens:
                return False
            self.clear()
            self._room = room
            # Zeros, as even masked places must be numbers.
            self._layers = [blocks.new_zeros(*room, *blocks.shape[2:]) for blocks in self._blocks]
        wanted = [(chunk.sequence.number, chunk.start) for chunk in chunks]
        missing = [row for row, each in enumerate(wanted) if each not in self._held[row : row + 1]]
        if missing:
            index = torch.tensor(missing, device=table.device)
            for layer, blocks in zip(self._layers, self._blocks, strict=True):
                layer[index, :places] = blocks[table[index]].flatten(1, 2)
        self._held = [(number, start + 1) for number, start in wanted]
        new = [row * self._room[1] + start for row, (_, start) in enumerate(wanted)]
        self._new = torch.tensor(new, device=table.device)
        self._view = (slice(rows), slice(places))
        return True

    def update(self, states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """`states`: [rows, 2, heads, size]; comes back as [rows, places, 2, heads, size] with all before."""
        layer = self._layers[layer_idx]
        layer.view(-1, *layer.shape[2:]).index_copy_(0, self._new, states)
        return layer[self._view]


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
