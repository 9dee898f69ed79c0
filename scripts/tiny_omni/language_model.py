"""The later stages of the training: conversations over the items of a pool."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from scripts.tiny_omni.checkpoint import END, MERGE, POSITIONS_PER_SECOND, TURN, make_processor
from scripts.tiny_omni.conversations import (
    ASK_ALL_UNSEEN,
    Conversation,
    Draw,
    make_conversation,
    make_small_talk,
)
from scripts.tiny_omni.encoders import Descent, encode
from scripts.tiny_omni.features import Features, Pool, swapped
from tests.support.synthetic_media import (
    MODALITIES,
    Modality,
)

log = logging.getLogger("train_tiny_omni")


@dataclass(frozen=True)
class Key:
    """Names an item of a pool, as it is or in a mirror or backwards."""

    modality: Modality
    index: int
    flips: tuple[bool, bool, bool] = (False, False, False)

    def look_up(self, pool: Pool) -> Features:
        """The item itself."""
        item = pool[self.modality][self.index]
        return item.flipped(*self.flips) if any(self.flips) else item


@dataclass
class Example:
    """A conversation as token ids (L,), mrope positions (3, L) and `targets` (L,).

    A target of 2 marks the last answer, 1 an earlier one, 0 what is not learnt. The item `keys[k]` belongs to
    the k-th run of placeholders.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    keys: list[Key]


def make_example(
    processor: Qwen2_5OmniProcessor,
    talk: Conversation,
    pool: Pool,
    rng: Generator | None = None,
    pooled: int = 0,
) -> Example:
    """Tokenize a conversation and lay out its items, each in at most `pooled` tokens unless that is 0.

    `rng` varies the clock of the clips now and then: a server may not know it.
    """
    tokenizer = processor.tokenizer
    text = processor.apply_chat_template(talk.messages, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    turn, end, assistant = (tokenizer.convert_tokens_to_ids(token) for token in (TURN, END, "assistant"))
    placeholders = {processor.image_token_id, processor.audio_token_id, processor.video_token_id}

    targets = np.zeros(len(ids), np.int64)
    starts = [at for at, token in enumerate(ids) if token == turn]
    for number, start in enumerate(starts):
        if number in talk.taught:
            assert ids[start + 1] == assistant
            stop = ids.index(end, start) + 1
            targets[start + 3 : stop] = 2 if number == len(starts) - 1 else 1

    rows, spans, marks, cursor, items = [], [], [], 0, iter(talk.items)
    for at, token in enumerate(ids):
        if token not in placeholders:
            rows.append(np.array([token]))
            spans.append(np.full((3, 1), cursor))
            marks.append(targets[at : at + 1])
            cursor += 1
            continue
        modality, key = next(items)
        item = pool[modality][key.index]
        num_tokens = min(item.num_tokens, pooled or item.num_tokens)
        rows.append(np.full(num_tokens, token))
        marks.append(np.zeros(num_tokens, np.int64))
        if modality == "audio" or pooled:
            span = np.broadcast_to(np.arange(num_tokens), (3, num_tokens))
        else:
            seconds = float(rng.uniform(0.1, 3.0)) if rng is not None and rng.random() < 0.2 else item.seconds
            span = np.indices((item.grid[0], item.grid[1] // MERGE, item.grid[2] // MERGE)).reshape(3, -1)
            span[0] = (span[0] * seconds * POSITIONS_PER_SECOND).astype(np.int64)
        spans.append(span + cursor)
        cursor += int(span.max()) + 1
    keys = [key for _, key in talk.items]
    return Example(np.concatenate(rows), np.concatenate(spans, axis=1), np.concatenate(marks), keys)


def pool_draw(pool: Pool, mirrored: bool = False) -> Draw:
    """Draws from a pool, mirrored if the encoders are there to see it."""

    def draw(modality: Modality, rng: Generator) -> tuple[Key, str]:
        index = int(rng.integers(len(pool[modality])))
        label = pool[modality][index].label
        if not mirrored or modality == "audio":
            return Key(modality, index), label
        horizontal, vertical, backwards = (
            bool(f) for f in rng.random(3) < (0.5, 0.1, 0.5 * (modality == "video"))
        )
        if horizontal != backwards:
            label = swapped(label, "left", "right")
        if vertical != backwards:
            label = swapped(label, "up", "down")
        return Key(modality, index, (horizontal, vertical, backwards)), label

    return draw


def curriculum(progress: float) -> NDArray[np.float64]:
    """Shares of conversations with 1, 2, ... 20 items, when `progress` in [0, 1] of a stage is done."""
    shares: NDArray[np.float64] = np.zeros(20)
    if progress < 0.1:
        shares[:2] = 0.6, 0.4
    elif progress < 0.25:
        shares[:4] = 0.3, 0.3, 0.25, 0.15
    elif progress < 0.45:
        shares[:8] = 0.22, 0.2, 0.2, 0.2, 0.07, 0.06, 0.03, 0.02
    else:
        shares[:8] = 0.2, 0.18, 0.16, 0.2, 0.08, 0.07, 0.04, 0.05
        shares[8:] = 0.02 / 12
    shares /= shares.sum()
    return shares


class Conversations(torch.utils.data.IterableDataset[list[list[Example]]]):
    """Steps of `stage.conversations` examples each, in batches of about the same length.

    A step always has conversations of every kind: Muon's steps are equally long whatever the loss, so a step
    on what is known already would only shake the weights.
    """

    def __init__(self, pool: Pool, stage: "Stage") -> None:
        self.pool, self.stage = pool, stage

    def __iter__(self) -> Iterator[list[list[Example]]]:
        stage, processor, rng = self.stage, make_processor(), np.random.default_rng(self.stage.seed)
        draw = pool_draw(self.pool, mirrored=stage.encoder_rate > 0)
        for step in range(stage.steps):
            shares = curriculum(stage.start + (stage.stop - stage.start) * step / stage.steps)
            examples = []
            for _ in range(stage.conversations):
                if rng.random() < 0.1:
                    talk = make_small_talk(rng)
                else:
                    talk = make_conversation(rng, draw, int(rng.choice(20, p=shares)) + 1)
                examples.append(make_example(processor, talk, self.pool, rng, stage.pooled))
            yield list(self._batches(sorted(examples, key=lambda e: len(e.ids))))

    def _batches(self, examples: list[Example]) -> Iterator[list[Example]]:
        batch: list[Example] = []
        for example in examples:
            if batch and len(example.ids) * (len(batch) + 1) > 3000:
                yield batch
                batch = []
            batch.append(example)
        yield batch


Embed = Callable[[Sequence[Key]], list[Tensor]]  # -> embeddings (num_tokens, hidden) of each


def answer_logits(
    model: Qwen2_5OmniThinkerForConditionalGeneration, batch: Sequence[Example], embed: Embed, pooled: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (N, vocab), token ids (N,) and target marks (N,) of every token to be predicted in the batch."""
    longest = max(len(example.ids) for example in batch)

    def stacked(rows: Sequence[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(
            np.stack([np.pad(r, [(0, 0)] * (r.ndim - 1) + [(0, longest - r.shape[-1])]) for r in rows])
        )

    ids, marks = stacked([e.ids for e in batch]), stacked([e.targets for e in batch])
    positions = stacked([e.positions for e in batch]).transpose(0, 1)
    embeddings = model.get_input_embeddings()(ids)
    keys = [key for example in batch for key in example.keys]
    if keys:
        config = model.config
        is_item = (
            (ids == config.image_token_id) | (ids == config.audio_token_id) | (ids == config.video_token_id)
        )
        items = embed(keys)
        if pooled:
            items = [F.adaptive_avg_pool1d(item.T, min(len(item), pooled)).T for item in items]
        embeddings = embeddings.masked_scatter(is_item[..., None], torch.cat(items))
    # Padding is on the right, where causal attention never looks: no mask is needed.
    hidden = model.model.language_model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)[0]
    wanted = marks[:, 1:] > 0
    return model.lm_head(hidden[:, :-1][wanted]), ids[:, 1:][wanted], marks[:, 1:][wanted]


Suite = Callable[[Generator, Draw], Conversation]
SUITES: dict[str, Suite] = {
    "one image": lambda rng, draw: make_conversation(rng, draw, 1, ["image"], "all", "single"),
    "one audio": lambda rng, draw: make_conversation(rng, draw, 1, ["audio"], "all", "single"),
    "one video": lambda rng, draw: make_conversation(rng, draw, 1, ["video"], "all", "single"),
    "two mixed items": lambda rng, draw: make_conversation(rng, draw, 2, MODALITIES, "all", "single"),
    "four mixed items": lambda rng, draw: make_conversation(rng, draw, 4, MODALITIES, "all", "single"),
    "four images": lambda rng, draw: make_conversation(rng, draw, 4, ["image"], "all", "single"),
    "eight mixed items": lambda rng, draw: make_conversation(rng, draw, 8, MODALITIES, "all", "single"),
    "sixteen mixed items": lambda rng, draw: make_conversation(rng, draw, 16, MODALITIES, "all", "single"),
    "one of four items asked for": lambda rng, draw: make_conversation(
        rng, draw, 4, MODALITIES, "one", "single"
    ),
    "four items over several turns": lambda rng, draw: make_conversation(
        rng, draw, 4, MODALITIES, "all", "turns"
    ),
    "four items, several user messages": lambda rng, draw: make_conversation(
        rng, draw, 4, MODALITIES, "all", "split"
    ),
    "asked again in a later turn": lambda rng, draw: make_conversation(
        rng, draw, 3, MODALITIES, "all", "later"
    ),
    "unseen wordings, three items": lambda rng, draw: make_conversation(
        rng, draw, 3, MODALITIES, "all", "single", ASK_ALL_UNSEEN
    ),
    "who are you, with three items": lambda rng, draw: make_conversation(
        rng, draw, 3, MODALITIES, "identity", "single"
    ),
    "text alone": lambda rng, draw: make_small_talk(rng),
}


@torch.no_grad()
def exact_shares(
    model: Qwen2_5OmniThinkerForConditionalGeneration,
    processor: Qwen2_5OmniProcessor,
    pool: Pool,
    embed: Embed,
    per_suite: int,
    pooled: int = 0,
) -> dict[str, float]:
    """Share of conversations whose last answer is right in every token.

    The tokens before are given, which for greedy decoding comes to the same: the first wrong token decides.
    """
    shares = {}
    for name, suite in SUITES.items():
        rng = np.random.default_rng(7)
        right = []
        for _ in range(0, per_suite, 20):
            talks = [suite(rng, pool_draw(pool)) for _ in range(20)]
            batch = [make_example(processor, talk, pool, pooled=pooled) for talk in talks]
            logits, ids, marks = answer_logits(model, batch, embed, pooled)
            counts = [int((e.targets > 0).sum()) for e in batch]
            wrong = (logits.argmax(-1) != ids) & (marks == 2)
            right += [not bool(part.any()) for part in torch.split(wrong, counts)]
        shares[name] = float(np.mean(right))
    return shares


def cached_embeddings(model: Qwen2_5OmniThinkerForConditionalGeneration, pool: Pool) -> Embed:
    """Run the encoders over a pool once and serve the embeddings from memory."""
    known: dict[Modality, list[Tensor]] = {}
    with torch.no_grad():
        for modality in MODALITIES:
            known[modality] = []
            for at in range(0, len(pool[modality]), 100):
                known[modality] += [e.clone() for e in encode(model, pool[modality][at : at + 100])]
    return lambda keys: [known[key.modality][key.index] for key in keys]


def live_embeddings(model: Qwen2_5OmniThinkerForConditionalGeneration, pool: Pool) -> Embed:
    """Run the encoders at each call."""
    return lambda keys: encode(model, [key.look_up(pool) for key in keys])


@dataclass(frozen=True)
class Stage:
    """Settings of a stage that learns conversations."""

    steps: int
    rate: float  # of the matrices of the language model
    encoder_rate: float = 0.0  # of the encoders; 0 keeps them frozen, and their output in memory
    start: float = 0.0  # where in the curriculum it begins
    stop: float = 1.0  # and ends
    pooled: int = 0  # tokens that an item is averaged to; 0 for all of them
    conversations: int = 48  # in a step
    seed: int = 2


POOL_SIZES: dict[Modality, int] = {"image": 7000, "audio": 4000, "video": 5000}
STAGES = (
    Stage(steps=1100, rate=0.01, pooled=2),
    Stage(steps=500, rate=0.01, start=0.5, seed=3),
    Stage(steps=600, rate=0.004, encoder_rate=0.003, start=0.6, seed=4),
)


def train_conversations(
    model: Qwen2_5OmniThinkerForConditionalGeneration,
    processor: Qwen2_5OmniProcessor,
    pool: Pool,
    held_out: Pool,
    stage: Stage,
) -> None:
    """One of the later stages: what to say."""
    speaker = nn.ModuleDict({"lm_head": model.lm_head})
    groups: list[tuple[nn.Module, float]] = [(model.model.language_model, stage.rate), (speaker, stage.rate)]
    if stage.encoder_rate:
        groups += [(model.model.visual, stage.encoder_rate), (model.model.audio_tower, stage.encoder_rate)]
    descent = Descent(groups, stage.steps)
    embeddings = live_embeddings if stage.encoder_rate else cached_embeddings
    embed, embed_held_out = embeddings(model, pool), embeddings(model, held_out)
    loader = torch.utils.data.DataLoader(
        Conversations(pool, stage), batch_size=None, num_workers=1, prefetch_factor=16
    )
    clock, tokens = time.monotonic(), 0
    for step, batches in enumerate(loader):
        num_targets = sum(int((example.targets > 0).sum()) for batch in batches for example in batch)
        total = 0.0
        for batch in batches:
            logits, ids, _ = answer_logits(model, batch, embed, stage.pooled)
            loss = F.cross_entropy(logits, ids, reduction="sum") / num_targets
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        descent.step()
        tokens += sum(len(example.ids) for batch in batches for example in batch)
        if step % 50 == 0 or step == stage.steps - 1:
            rate = tokens / (time.monotonic() - clock)
            log.info("conversations %d/%d loss %.4f, %.0f tokens/s", step, stage.steps, total, rate)
        if step % 250 == 249 or step == stage.steps - 1:
            for name, share in exact_shares(
                model, processor, held_out, embed_held_out, 40, stage.pooled
            ).items():
                log.info("  unseen: %5.1f%% %s", 100 * share, name)
