"""The check at start leaves out what does not come out exactly as the processor makes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from deployments.processor.exactness import only_what_is_exact
from deployments.processor.item_processor import Handling, ItemProcessor
from deployments.stages.mm_preprocessor import MMPreprocessor, MMPreprocessorConfig
from deployments.types import Modality
from tests.support.tiny_families import FAMILIES, paligemma
from tests.support.tiny_models import DECODER, OMNI, image, processor, qwen_vl

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

IMAGE, AUDIO, VIDEO = Modality


def tried(name: str) -> ItemProcessor:
    folder = next(family.folder() for family in FAMILIES if family.name == name)
    return only_what_is_exact(ItemProcessor(processor(folder)))


def tried_as(cls: Any) -> ItemProcessor:
    """The bundled model's processor, rebuilt as another class."""
    own = processor(OMNI)
    parts = (own.image_processor, own.video_processor, own.feature_extractor, own.tokenizer)
    return only_what_is_exact(ItemProcessor(cls(*parts, chat_template=own.chat_template)))


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_family_serves_all_of_its_modalities(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    assert tried(name).spec().modalities == [m for m in Modality if m in family.modalities]


@pytest.mark.parametrize(
    ("name", "modality"),
    [
        ("LLaVA-OneVision", IMAGE),  # only an image that is alone is cut into tiles
        ("Gemma 3n", AUDIO),  # sounds are padded before the spectrum is computed
        ("Phi-4-multimodal", AUDIO),
    ],
)
def test_items_that_influence_each_other_are_processed_in_one_call(name: str, modality: Modality) -> None:
    assert tried(name).spec().joint == [modality]


def test_a_modality_that_is_not_exact_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    class Appending(type(processor(OMNI))):  # type: ignore[misc]
        """Appends a text of its own to a conversation with images."""

        def prepare_inputs_layout(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
            if images is not None:
                text = [sample + "<|im_end|>" for sample in text]
            return super().prepare_inputs_layout(images=images, text=text, **kwargs)

    with caplog.at_level("WARNING", "ray.serve"):
        items = tried_as(Appending)
    assert items.spec().modalities == [AUDIO, VIDEO]
    assert "Appending: image input does not come out" in caplog.text


def test_modalities_that_do_not_mix_are_not_both_served(caplog: pytest.LogCaptureFixture) -> None:
    class Mixing(type(processor(OMNI))):  # type: ignore[misc]
        def __call__(self, **kwargs: Any) -> Any:
            answer = super().__call__(**kwargs)
            if kwargs.get("images") is not None and kwargs.get("videos") is not None:
                answer["pixel_values"] = answer["pixel_values"] * 2
            return answer

    with caplog.at_level("WARNING", "ray.serve"):
        items = tried_as(Mixing)
    assert items.spec().modalities == [IMAGE, AUDIO]
    assert "Mixing: video" in caplog.text
    assert "pixel_values differs" in caplog.text


def test_a_model_without_any_exact_modality_does_not_start() -> None:
    class Failing(type(processor(OMNI))):  # type: ignore[misc]
        def __call__(self, **kwargs: Any) -> Any:
            raise RuntimeError("no")

    with pytest.raises(ValueError, match=r"Failing: video input .* RuntimeError: no"):
        tried_as(Failing)


def test_a_family_whose_items_cannot_be_processed_separately_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="PaliGemmaProcessor: image input does not come out"):
        MMPreprocessor(MMPreprocessorConfig(model=paligemma()), DECODER)


def test_each_item_of_a_joint_call_gets_its_share() -> None:
    items = tried("LLaVA-OneVision")
    some = [image(seed, 40 + seed, 56) for seed in range(3)]
    jointly = items.process(some)
    alone = [items.process([item])[0] for item in some]
    assert [each.num_tokens for each in jointly] == [17, 17, 17]
    assert all(each.num_tokens > 17 for each in alone)
    assert all(each.features["pixel_values"].shape == (1, 1, 3, 32, 32) for each in jointly)
    # The result for an item depends on the other items of the call, and so does its digest.
    assert len({each.digest for each in jointly + alone}) == 6


def test_the_check_does_not_change_the_processor_that_it_tries() -> None:
    subject = ItemProcessor(processor(OMNI))
    found = only_what_is_exact(subject)
    assert subject.handlings == {modality: Handling() for modality in (IMAGE, AUDIO, VIDEO)}
    assert found.handlings[IMAGE].normalizations.keys() == {"pixel_values"}
    assert not found.handlings[IMAGE].jointly


def test_the_first_exact_candidate_wins() -> None:
    omni, one_vision, llava = (
        tried(name) for name in ("Qwen2.5-Omni thinker", "LLaVA-OneVision", "LLaVA-1.5")
    )
    assert [bool(omni.handlings[m].normalizations) for m in (IMAGE, AUDIO, VIDEO)] == [True, False, True]
    assert one_vision.handlings == {IMAGE: Handling(jointly=True), VIDEO: Handling()}
    assert llava.handlings == {IMAGE: Handling()}


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("Qwen2.5-VL", True),  # pixels travel as bytes, and the tiny processor scales images down
        ("Phi-4-multimodal", False),  # floats, 448 x 448 for each tile
        ("Qwen2-Audio", False),  # takes no images
    ],
)
def test_the_spec_says_if_features_of_a_small_image_fit_in_a_message(name: str, fits: bool) -> None:
    assert tried(name).spec().small_images_inline is fits


def test_without_deferred_normalization_a_small_image_does_not_fit() -> None:
    """A processor that keeps the size of the image: 301 KiB as bytes, four times that as floats."""
    whole = copy.copy(processor(qwen_vl()))
    sizes = {"shortest_edge": 56 * 56, "longest_edge": 1024 * 1024}
    whole.image_processor = type(whole.image_processor)(patch_size=14, merge_size=2, size=sizes)
    plain = ItemProcessor(whole)
    assert only_what_is_exact(plain).spec().small_images_inline
    assert not plain.spec().small_images_inline
