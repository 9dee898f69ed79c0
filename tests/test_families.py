"""Every family: items processed apart are, joined, what one call of the processor makes of the whole."""

from __future__ import annotations

import pytest
from families import DOCS, document
from family_models import WITH_MODELS, tiny_model
from tiny_families import FAMILIES, Family, compared, conversation, samples
from tiny_models import Item, arguments_of, assembled, chat, item_processor, joint_call, processor, tokenizer

from deployments.types import Chat, Modality

# Of transformers, in GLM-4V's own way of marking videos.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("one_thread"),
]

every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def assert_exact(family: Family, chat: Chat, items: list[Item], **settings: int | bool) -> None:
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
def test_items_alone_with_no_text_between_equal_one_joint_call(family: Family) -> None:
    items = samples(family)
    assert_exact(family, chat(*(media for media, _ in items)), items)


@every_family
def test_text_alone_equals_one_joint_call(family: Family) -> None:
    assert_exact(family, chat("  Who are you?\n"), [])


@pytest.mark.parametrize("family", WITH_MODELS, ids=str)
def test_models_take_the_inputs_and_answer_alike(family: Family) -> None:
    import torch

    items = samples(family)[: len(family.modalities) + 1]
    if family.name == "GLM-4V":  # its model takes images or videos in one request
        items = [item for item in items if item[0].modality == Modality.IMAGE]
    model, folder = tiny_model(family), family.folder()
    with torch.inference_mode():
        ours = model(**assembled(folder, conversation(items), items, arguments_of(family.model_class))).logits
        theirs = model(**joint_call(folder, conversation(items), items)).logits
    assert ours.isfinite().all()
    assert torch.equal(ours, theirs)


@every_family
def test_control_tokens_that_a_user_types_are_text(family: Family) -> None:
    folder = family.folder()
    special = {token.content: i for i, token in processor(folder).tokenizer.added_tokens_decoder.items()}
    typed = " ".join(token for token in special if not token.isspace())
    item = {"type": str(family.modalities[0])}

    def placed(name: str, *texts: str) -> tuple[list[int], int]:
        parts = [{"type": "text", "text": text} for text in texts]
        prompt = tokenizer(folder).encode(Chat([{"role": "user", "name": name, "content": [*parts, item]}]))
        blanks = {i for token, i in special.items() if token.isspace()}
        control = [i for i in prompt.token_ids if i in set(special.values()) - blanks]
        return control, len(prompt.placeholders)

    harmless = placed("Eve", "hello", "you")
    assert harmless[1] == 1
    assert placed("Eve", typed, "you") == harmless
    assert placed(typed, "hello", "you") == harmless
    for token in special:
        if len(token) > 1 and not token.isspace():
            assert placed("Eve", token[: len(token) // 2], token[len(token) // 2 :]) == harmless, token


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
@every_family
def test_settings_of_a_request_are_those_of_the_joint_call(family: Family) -> None:
    items = samples(family)
    plain = item_processor(family.folder())
    for name, ceiling in plain.spec.settings.items():
        value: int | bool = (
            name in {"do_pan_and_scan", "crop_to_patches"} if ceiling is None else ceiling // 2
        )
        if name == "max_soft_tokens":
            continue  # the smallest value of the processor is the tiny one's own
        assert_exact(family, conversation(items), items, **{name: value})


def test_the_table_in_the_docs_is_true() -> None:
    assert DOCS.read_text(encoding="utf-8") == document(), "run scripts/families.py --write"
