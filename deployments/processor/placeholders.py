"""Placeholders: one special token in the prompt for each item, and the tokens that replace it.

A tokenizer always splits at its special tokens. Therefore a placeholder can be replaced after encoding: the
ids are those of the expanded text, as long as a special token lies at each border, on one side or the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from deployments.types import MMFeatures, Prompt

# Features with one entry for each token of the replacement: they belong to the prompt, not to the item.
PER_TOKEN = frozenset({"mm_token_type_ids", "token_type_ids"})


class Span(NamedTuple):
    """The position of an item's tokens in the expanded prompt."""

    offset: int
    length: int


def run_lengths(token_ids: Iterable[int]) -> list[tuple[int, int]]:
    """Compresses [7, 7, 7, 9] to [(7, 3), (9, 1)]: a large image repeats one id thousands of times."""
    return [(token_id, sum(1 for _ in run)) for token_id, run in groupby(token_ids)]


def expand(prompt: Prompt, features: Sequence[MMFeatures]) -> tuple[list[int], list[Span]]:
    """Replaces each placeholder by its item's token ids; returns the prompt and each item's span in it.

    `features` and the spans are in item order, as `prompt.placeholders` are.
    """
    pairs = list(zip(prompt.placeholders, features, strict=True))
    for (modality, _), item in pairs:
        assert modality == item.modality, f"a placeholder for {modality} met features of {item.modality}"

    token_ids: list[int] = []
    spans = [Span(0, 0)] * len(pairs)
    copied = 0
    for index in sorted(range(len(pairs)), key=lambda i: prompt.placeholders[i][1]):
        (_, position), item = pairs[index]
        token_ids += prompt.token_ids[copied:position]
        spans[index] = Span(len(token_ids), item.length)
        for token_id, count in item.replacement:
            token_ids += [token_id] * count
        copied = position + 1
    token_ids += prompt.token_ids[copied:]
    return token_ids, spans
