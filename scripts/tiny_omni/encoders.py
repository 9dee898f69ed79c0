"""The first stage of the training: the encoders alone, with heads that are thrown away."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from scripts.tiny_omni.features import Features, Pool
from tests.support.synthetic_media import (
    COLOURS,
    MODALITIES,
    MOTIONS,
    SHAPES,
    SOUNDS,
    Modality,
)

log = logging.getLogger("train_tiny_omni")


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    cu_seq_lens_q: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention inside each of many short packed sequences at once: (1, heads, S, D) -> (1, S, heads, D).

    The stock one loops over the sequences, which takes most of the time of an encoder this small.
    """
    lengths = cu_seq_lens_q.diff().long()
    longest = int(lengths.max())
    valid = torch.arange(longest) < lengths[:, None]  # (sequences, longest)
    places = valid.flatten().nonzero().squeeze(1)

    def unpack(packed: Tensor) -> Tensor:
        rows = packed[0].transpose(0, 1)  # (S, heads, D)
        padded = rows.new_zeros(valid.numel(), *rows.shape[1:]).index_copy(0, places, rows)
        return padded.view(*valid.shape, *rows.shape[1:]).transpose(1, 2)

    mask = None if bool(valid.all()) else valid[:, None, None, :]
    out = F.scaled_dot_product_attention(
        unpack(query), unpack(key), unpack(value), attn_mask=mask, scale=kwargs["scaling"]
    )
    return out.transpose(1, 2).flatten(0, 1)[places].unsqueeze(0), None


AttentionInterface.register("packed_flash", _packed_attention)


def encode(model: Qwen2_5OmniThinkerForConditionalGeneration, items: Sequence[Features]) -> list[Tensor]:
    """Embeddings (num_tokens, hidden) of each item, in order."""
    found: dict[int, Tensor] = {}
    seen = [k for k, item in enumerate(items) if item.modality != "audio"]
    heard = [k for k, item in enumerate(items) if item.modality == "audio"]
    if seen:
        pixels = (
            torch.from_numpy(np.concatenate([items[k].array for k in seen])).float().div_(127.5).sub_(1.0)
        )
        grid = torch.tensor([items[k].grid for k in seen])
        out = model.model.visual(pixels, grid_thw=grid).pooler_output
        found.update(zip(seen, out.split([items[k].num_tokens for k in seen]), strict=True))
    if heard:
        mels = torch.from_numpy(np.concatenate([items[k].array for k in heard], axis=1)).float()
        lengths = torch.tensor([items[k].array.shape[1] for k in heard])
        out = model.model.audio_tower(mels, feature_lens=lengths).last_hidden_state
        found.update(zip(heard, out.split([items[k].num_tokens for k in heard]), strict=True))
    return [found[k] for k in range(len(items))]


def whiten(model: Qwen2_5OmniThinkerForConditionalGeneration, pool: Pool) -> None:
    """Start the patch embedding as the principal components of real patches, all of equal strength.

    A patch is mostly one flat colour: without this, edges are drowned out, and shapes take long to learn.
    """
    rng = np.random.default_rng(5)
    arrays = [item.array for modality in ("image", "video") for item in pool[modality][:2500]]
    patches = np.concatenate([a[rng.integers(len(a), size=12)] for a in arrays]) / 127.5 - 1.0
    strength, direction = np.linalg.eigh(np.cov(patches.T))  # weakest first
    weight = model.model.visual.patch_embed.proj.weight
    strength, direction = strength[: -len(weight) - 1 : -1], direction[:, : -len(weight) - 1 : -1]
    whitening = 0.5 * direction / np.sqrt(strength + 0.01 * strength[10])
    with torch.no_grad():
        weight.copy_(torch.from_numpy(whitening.T).view_as(weight))


def _targets(item: Features) -> list[int]:
    """Class indices of an item: its sound; or its colour, shape and, in a clip, motion (-1 in an image)."""
    if item.modality == "audio":
        return [SOUNDS.index(item.label)]
    colour, shape, *motion = item.label.split(" ", 2)
    return [
        list(COLOURS).index(colour),
        SHAPES.index(shape),
        list(MOTIONS).index(motion[0]) if motion else -1,
    ]


class Head(nn.Module):
    """A linear classifier of a weighted mean of an item's embeddings, as attention would take it."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(hidden, 1)
        nn.init.zeros_(self.weigh.weight)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, embeddings: Tensor, valid: Tensor) -> Tensor:
        """(items, tokens, hidden) and (items, tokens) -> logits (items, classes)."""
        weights = self.weigh(embeddings).squeeze(-1).masked_fill(~valid, -1e9).softmax(-1)
        logits: Tensor = self.classify((weights[..., None] * embeddings).sum(1))
        return logits


class Heads(nn.Module):
    """One head for each property of an item, thrown away after the first stage."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.seen = nn.ModuleList(Head(hidden, n) for n in (len(COLOURS), len(SHAPES), len(MOTIONS)))
        self.heard = nn.ModuleList([Head(hidden, len(SOUNDS))])

    def forward(
        self, items: Sequence[Features], embeddings: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        """Summed cross entropy, and the share of right answers by name of the head."""
        loss, right = torch.zeros(()), {}
        padded = nn.utils.rnn.pad_sequence(list(embeddings), batch_first=True)
        valid = torch.arange(padded.shape[1]) < torch.tensor([len(e) for e in embeddings])[:, None]
        for heads, names, chosen in (
            (
                self.seen,
                ("colour", "shape", "motion"),
                [k for k, i in enumerate(items) if i.modality != "audio"],
            ),
            (self.heard, ("sound",), [k for k, i in enumerate(items) if i.modality == "audio"]),
        ):
            if not chosen:
                continue
            wanted = torch.tensor([_targets(items[k]) for k in chosen])
            for head, name, target in zip(heads, names, wanted.T, strict=True):
                logits = head(padded[chosen], valid[chosen])
                known = target >= 0
                if known.any():
                    loss = loss + F.cross_entropy(logits[known], target[known])
                    right[name] = float((logits.argmax(-1) == target)[known].float().mean())
        return loss, right


ENCODER_STEPS = 800
ENCODER_BATCH: dict[Modality, int] = {"image": 40, "audio": 12, "video": 32}


def train_encoders(
    model: Qwen2_5OmniThinkerForConditionalGeneration, pool: Pool, held_out: Pool, steps: int
) -> None:
    """Stage 1: the encoders alone."""
    rng = np.random.default_rng(1)
    heads = Heads(model.config.text_config.hidden_size)
    whiten(model, pool)
    descent = Descent([(model.model.visual, 0.02), (model.model.audio_tower, 0.02), (heads, 0.02)], steps)
    for step in range(steps):
        items = []
        for modality in MODALITIES:
            for index in rng.integers(len(pool[modality]), size=ENCODER_BATCH[modality]):
                items.append(augmented(rng, pool[modality][index]))
        loss, right = heads(items, encode(model, items))
        loss.backward()
        descent.step()
        if step % 50 == 0 or step == steps - 1:
            log.info("encoders %d/%d loss %.3f %s", step, steps, loss.item(), _percent(right))
        if step % 200 == 199 or step == steps - 1:
            for modality in MODALITIES:
                with torch.no_grad():
                    right = heads(held_out[modality], encode(model, held_out[modality]))[1]
                log.info("  unseen %ss: %s", modality, _percent(right))


def augmented(rng: Generator, item: Features) -> Features:
    """An image or a clip in a random mirror, a clip sometimes backwards; a spectrogram as it is."""
    if item.modality == "audio":
        return item
    horizontal, vertical, backwards = rng.random(3) < (0.5, 0.1, 0.5 * (item.modality == "video"))
    return item.flipped(bool(horizontal), bool(vertical), bool(backwards))


class Descent:
    """Descends with Muon on matrices and AdamW on the rest; warm-up, then linearly down to nothing.

    Muon gives every direction of a matrix an equal step. Here it takes a quarter of AdamW's steps.
    """

    def __init__(self, groups: Sequence[tuple[nn.Module, float]], steps: int) -> None:
        """`groups` are (module, learning rate of its matrices); the rate of all the rest goes with it.

        The embedding of tokens, the output layer and the heads count as the rest: each row is for itself.
        """
        self.steps, self.done = steps, 0
        self.parameters = [p for module, _ in groups for p in module.parameters()]
        self.matrices, vectors = [], []
        for module, rate in groups:
            inner = {
                id(p)
                for name, p in module.named_parameters()
                if p.ndim >= 2 and not name.startswith(("embed_tokens", "lm_head", "seen", "heard"))
            }
            self.matrices.append(([p for p in module.parameters() if id(p) in inner], rate))
            vectors.append(
                {"params": [p for p in module.parameters() if id(p) not in inner], "lr": 0.15 * rate}
            )
        self.momenta = {
            p: torch.zeros_like(p.flatten(1)) for parameters, _ in self.matrices for p in parameters
        }
        self.adam = torch.optim.AdamW(vectors, weight_decay=0.0, betas=(0.9, 0.98))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adam, lambda _: self.factor)

    @property
    def factor(self) -> float:
        """Returns the factor of the learning rates at this step."""
        warm = max(1, min(50, self.steps // 25))
        return min((self.done + 1) / warm, 1.0, max(0.01, 1.25 * (1 - self.done / self.steps)))

    @torch.no_grad()
    def step(self) -> None:
        """One step down the gradient that the parameters hold, which is used up."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        for parameters, rate in self.matrices:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in parameters:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.flatten(1).shape), []).append(parameter)
            for (rows, columns), same in by_shape.items():
                updates = []
                for parameter in same:
                    assert parameter.grad is not None
                    gradient, momentum = parameter.grad.flatten(1), self.momenta[parameter]
                    momentum.lerp_(gradient, 0.05)
                    updates.append(gradient.lerp(momentum, 0.95))
                length = self.factor * rate * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(same, _orthogonal(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - 0.01 * self.factor * rate).sub_(
                        update.view_as(parameter), alpha=length
                    )
        for parameter in self.parameters:
            parameter.grad = None
        self.done += 1
        self.schedule.step()


def _orthogonal(matrices: Tensor) -> Tensor:
    """Matrices (n, rows, columns) with their singular values brought near one, by Newton-Schulz iteration."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = x.transpose(1, 2) if tall else x
    return result


def _percent(shares: dict[str, float]) -> str:
    return " ".join(f"{name} {100 * share:.1f}%" for name, share in shares.items())
