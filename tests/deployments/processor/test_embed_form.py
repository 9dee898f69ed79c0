"""Embedding forms are inferred from how a family's processor places a sample."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.errors import ServingError
from deployments.processor.embed_form import embeds_forms
from deployments.processor.processed_item import ProcessedItem
from deployments.types import Arrays, EmbedsForm, Media, Modality
from tests.support.tiny_models import OMNI, item_processor, qwen3_vl, qwen_vl

IMAGE, AUDIO, VIDEO = Modality.IMAGE, Modality.AUDIO, Modality.VIDEO


def test_forms_of_omni() -> None:
    forms = item_processor(OMNI).spec().embeds
    assert list(forms) == [IMAGE, AUDIO, VIDEO]
    assert (forms[IMAGE].grid, forms[IMAGE].merge, forms[IMAGE].seconds) == ("image_grid_thw", 2, "")
    assert (forms[AUDIO].grid, forms[AUDIO].token_types) == ("", {})
    assert (forms[VIDEO].grid, forms[VIDEO].seconds) == ("video_grid_thw", "video_second_per_grid")


def test_forms_of_a_family_with_token_types() -> None:
    forms = item_processor(qwen_vl()).spec().embeds
    assert forms.keys() == {IMAGE, VIDEO}
    assert forms[IMAGE].token_types == {"mm_token_type_ids": 1}
    assert forms[VIDEO].token_types == {"mm_token_type_ids": 2}
    assert forms[VIDEO].seconds == "second_per_grid_ts"


def test_a_video_whose_embeddings_are_interrupted_has_no_form() -> None:
    assert item_processor(qwen3_vl()).spec().embeds.keys() == {IMAGE}


def form_of(token_ids: list[int], **features: np.ndarray) -> EmbedsForm | None:
    def process(media: Media, arrays: Arrays) -> ProcessedItem:
        return ProcessedItem(IMAGE, token_ids, token_ids.count(7), dict(features), ("", ""), "", "")

    return embeds_forms([IMAGE], process).get(IMAGE)


def test_tokens_around_the_embeddings_belong_to_the_form() -> None:
    types = np.array([[0, 0, 1, 1, 1, 0]])
    assert form_of([3, 3, 7, 7, 7, 4], token_type_ids=types) == EmbedsForm(
        7, before=[(3, 2)], after=[(4, 1)], token_types={"token_type_ids": 1}
    )


@pytest.mark.parametrize("token_ids", [[7, 7, 4, 7, 7], [3, 3]])
def test_there_is_no_form_without_exactly_one_run_of_embeddings(token_ids: list[int]) -> None:
    assert form_of(token_ids) is None


def test_there_is_no_form_if_the_family_cannot_be_served() -> None:
    def refuse(media: Media, arrays: Arrays) -> ProcessedItem:
        raise ServingError("Media of this model's family cannot be served yet.")

    assert embeds_forms([IMAGE], refuse) == {}
