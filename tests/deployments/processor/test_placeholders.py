"""Expanding placeholders gives ids and spans in item order, whatever their order in the prompt."""

from __future__ import annotations

import pytest

from deployments.processor.placeholders import Span, expand, run_lengths
from deployments.types import MMFeatures, Modality, Prompt

IMAGE, AUDIO = Modality.IMAGE, Modality.AUDIO


def item(modality: Modality, *runs: tuple[int, int]) -> MMFeatures:
    return MMFeatures(modality, "digest", 0, list(runs), None, {})


def test_run_lengths() -> None:
    assert run_lengths([7, 7, 7, 9, 7]) == [(7, 3), (9, 1), (7, 1)]
    assert run_lengths([]) == []


def test_the_length_includes_the_tokens_around_the_embeddings() -> None:
    assert item(IMAGE, (8, 1), (7, 3), (9, 1)).length == 5


def test_a_prompt_of_text_is_unchanged() -> None:
    assert expand(Prompt([1, 2, 3], []), []) == ([1, 2, 3], [])


def test_each_placeholder_is_replaced_in_place() -> None:
    prompt = Prompt([1, 7, 2, 8, 3], [(IMAGE, 1), (AUDIO, 3)])
    token_ids, spans = expand(prompt, [item(IMAGE, (7, 3)), item(AUDIO, (4, 1), (8, 2), (5, 1))])
    assert token_ids == [1, 7, 7, 7, 2, 4, 8, 8, 5, 3]
    assert spans == [Span(1, 3), Span(5, 4)]


def test_neighbouring_placeholders_at_both_ends() -> None:
    prompt = Prompt([7, 7], [(IMAGE, 0), (IMAGE, 1)])
    token_ids, spans = expand(prompt, [item(IMAGE, (7, 1)), item(IMAGE, (7, 2))])
    assert token_ids == [7, 7, 7]
    assert spans == [Span(0, 1), Span(1, 2)]


def test_spans_are_in_item_order_if_the_template_moved_items() -> None:
    prompt = Prompt([1, 8, 2, 7], [(IMAGE, 3), (AUDIO, 1)])
    token_ids, spans = expand(prompt, [item(IMAGE, (7, 2)), item(AUDIO, (8, 3))])
    assert token_ids == [1, 8, 8, 8, 2, 7, 7]
    assert spans == [Span(5, 2), Span(1, 3)]


def test_each_placeholder_needs_an_item() -> None:
    with pytest.raises(ValueError, match="zip"):
        expand(Prompt([7], [(IMAGE, 0)]), [])


def test_modalities_must_agree() -> None:
    with pytest.raises(AssertionError, match="image"):
        expand(Prompt([7], [(IMAGE, 0)]), [item(AUDIO, (8, 1))])
