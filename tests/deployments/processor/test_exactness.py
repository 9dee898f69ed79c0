"""The trial at start: what does not come out as the processor makes it is not served."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.processor.exactness import only_what_is_exact
from deployments.processor.item_processor import ItemProcessor
from deployments.stages.mm_preprocessor import MMPreprocessor, MMPreprocessorConfig
from deployments.types import Modality
from tests.support.tiny_families import FAMILIES, paligemma
from tests.support.tiny_models import DECODER, OMNI, image, processor

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

IMAGE, AUDIO, VIDEO = Modality


def tried(name: str) -> ItemProcessor:
    folder = next(family.folder() for family in FAMILIES if family.name == name)
    return only_what_is_exact(ItemProcessor(processor(folder)))


def tried_as(cls: Any) -> ItemProcessor:
    """The bundled model's processor as another class."""
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
        ("LLaVA-OneVision", IMAGE),  # tiles are cut of an image that is alone
        ("Gemma 3n", AUDIO),  # sounds are padded before the spectrum is taken
        ("Phi-4-multimodal", AUDIO),
    ],
)
def test_what_depends_on_the_other_items_is_processed_in_one_call(name: str, modality: Modality) -> None:
    assert tried(name).spec().together == [modality]


def test_a_modality_that_does_not_come_out_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Appending(type(processor(OMNI))):  # type: ignore[misc]
        """Has words of its own for a conversation with images."""

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


def test_a_model_of_which_nothing_comes_out_does_not_start() -> None:
    class Failing(type(processor(OMNI))):  # type: ignore[misc]
        def __call__(self, **kwargs: Any) -> Any:
            raise RuntimeError("no")

    with pytest.raises(ValueError, match=r"Failing: video input .* RuntimeError: no"):
        tried_as(Failing)


def test_a_family_that_cannot_be_served_apart_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="PaliGemmaProcessor: image input does not come out"):
        MMPreprocessor(MMPreprocessorConfig(model=paligemma()), DECODER)


def test_an_item_of_several_that_are_processed_together_is_its_share() -> None:
    items = tried("LLaVA-OneVision")
    some = [image(seed, 40 + seed, 56) for seed in range(3)]
    together = items.process(some)
    alone = [items.process([item])[0] for item in some]
    assert [each.num_tokens for each in together] == [17, 17, 17]
    assert all(each.num_tokens > 17 for each in alone)
    assert all(each.features["pixel_values"].shape == (1, 1, 3, 32, 32) for each in together)
    # What becomes of an item depends on those beside it, and so does its digest.
    assert len({each.digest for each in together + alone}) == 6
