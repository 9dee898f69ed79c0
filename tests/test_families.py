"""Every family: items processed apart are, joined, what one call of the processor makes of the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from families import FAMILIES, Family, conversation, samples
from tiny_models import Item, arguments_of, assembled, chat, joint_call

from deployments.types import Chat

# Of transformers, in GLM-4V's own way of marking videos.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the stage: with several, the last bit depends on how much is computed at once."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_exact(family: Family, chat: Chat, items: list[Item], **settings: int | bool) -> None:
    import torch

    folder = family.folder()
    ours = assembled(folder, chat, items, arguments_of(family.model_class), settings)
    theirs = joint_call(folder, chat, items, **settings)
    assert theirs.keys() - ours.keys() <= family.not_for_the_model
    assert ours.keys() <= theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype, name
        assert torch.equal(array, theirs[name]), name


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
