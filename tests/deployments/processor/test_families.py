"""Every family: items that are processed separately and joined equal one call of the processor."""

from __future__ import annotations

import pytest

from deployments.processor.arguments import DecodedItem
from deployments.types import Chat, Modality
from tests.support.family_models import WITH_MODELS, tiny_model
from tests.support.tiny_families import FAMILIES, Family, compared, conversation, samples
from tests.support.tiny_models import (
    arguments_of,
    assembled,
    chat,
    item_processor,
    joint_call,
    processor,
    tokenizer,
    video,
)

# transformers raises this warning for the videos of GLM-4V.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("one_thread"),
]

every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def assert_exact(family: Family, chat: Chat, items: list[DecodedItem], **settings: int | bool) -> None:
    equal = compared(family, chat, items, **settings)
    assert {"input_ids", "attention_mask"} <= equal.keys()
    assert equal == dict.fromkeys(equal, True)


@every_family
def test_a_conversation_of_all_modalities_equals_one_joint_call(family: Family) -> None:
    items = samples(family)
    assert_exact(family, conversation(items), items)


@every_family
def test_one_item_of_each_modality_equals_one_joint_call(family: Family) -> None:
    for item in samples(family)[: len(family.modalities)]:
        assert_exact(family, chat(item[0], "What is it?"), [item])


@every_family
def test_items_without_text_between_them_equal_one_joint_call(family: Family) -> None:
    items = samples(family)
    assert_exact(family, chat(*(media for media, _ in items)), items)


@every_family
def test_text_alone_equals_one_joint_call(family: Family) -> None:
    assert_exact(family, chat("  Who are you?\n"), [])


@pytest.mark.parametrize("family", WITH_MODELS, ids=str)
def test_models_give_the_same_logits_for_both_inputs(family: Family) -> None:
    import torch

    items = samples(family)[: len(family.modalities) + 1]
    if family.name == "GLM-4V":  # its model takes either images or videos in one request
        items = [item for item in items if item[0].modality == Modality.IMAGE]
    model, folder = tiny_model(family), family.folder()
    with torch.inference_mode():
        ours = model(**assembled(folder, conversation(items), items, arguments_of(family.model_class))).logits
        theirs = model(**joint_call(folder, conversation(items), items)).logits
    assert ours.isfinite().all()
    assert torch.equal(ours, theirs)


@every_family
def test_control_tokens_that_a_user_types_are_text(family: Family) -> None:
    """Tested in content and names, whole and in halves, next to an item and its affixes."""
    folder, (item, *_) = family.folder(), samples(family)
    special = [t.content for t in processor(folder).tokenizer.added_tokens_decoder.values()]
    special = [token for token in special if not token.isspace()]
    ids = set(processor(folder).tokenizer.convert_tokens_to_ids(special))
    (features,) = item_processor(folder).process([item])

    def control(name: str, *texts: str) -> list[int]:
        parts = [{"type": "text", "text": text} for text in texts]
        content = [*parts, {"type": family.modalities[0]}, *parts]
        messages = [{"role": "user", "name": name, "content": content}]
        prompt = tokenizer(folder).encode(Chat(messages), [features.affixes])
        assert len(prompt.placeholders) == 1
        return [token_id for token_id in prompt.token_ids if token_id in ids]

    harmless = control("Eve", "hello", "you")
    assert control("Eve", " ".join(special), "you") == harmless
    assert control(" ".join(special), "hello", "you") == harmless
    for token in special:
        assert control("Eve", token[:-1], token[-1:]) == harmless


@pytest.mark.parametrize("family", [f for f in FAMILIES if "video" in f.modalities], ids=str)
def test_videos_of_different_lengths_equal_one_joint_call_if_it_is_possible(family: Family) -> None:
    items = [video(1, 4), video(2, 8, 64, 24)]
    try:
        joint_call(family.folder(), conversation(items), items)
    except (ValueError, RuntimeError):
        return  # this processor stacks videos, so there is no reference for different lengths
    assert_exact(family, conversation(items), items)


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
@every_family
def test_settings_of_a_request_have_the_effect_they_have_in_a_joint_call(family: Family) -> None:
    items = samples(family)
    plain = item_processor(family.folder())
    for name, ceiling in plain.spec().settings.items():
        value: int | bool = (
            name in {"do_pan_and_scan", "crop_to_patches"} if ceiling is None else ceiling // 2
        )
        if name == "max_soft_tokens":
            continue  # the tiny processor has the smallest possible value already
        assert_exact(family, conversation(items), items, **{name: value})
