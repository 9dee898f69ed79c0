"""Items processed alone and joined equal the result of one processor call for the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from deployments.errors import ServingError
from deployments.types import Arrays, Chat, Media
from tests.support.tiny_models import (
    MODELS,
    OMNI,
    accepts,
    assembled,
    audio,
    chat,
    engine_item,
    image,
    joint_call,
    qwen3_vl,
    qwen_vl,
    tokenizer,
    video,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
    pytest.mark.usefixtures("one_thread"),
]


def assert_joint(model: str, conversation: Chat, items: Sequence[tuple[Media, Arrays]]) -> None:
    import torch

    ours = assembled(model, conversation, items, accepts(model))
    theirs = joint_call(model, conversation, items)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype, name
        assert torch.equal(ours[name], expected), name


def interleaved(*kinds: str) -> Chat:
    """Puts media into two of five messages, with text around them."""
    parts = [{"type": kind} for kind in kinds]
    text = {"type": "text", "text": "and this?"}
    return Chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [parts[0], {"type": "text", "text": "What is it?"}, parts[1]]},
            {"role": "assistant", "content": [{"type": "text", "text": "A circle."}]},
            {"role": "user", "content": "Sure?"},
            {"role": "user", "content": [text, *parts[2:], text]},
        ]
    )


def test_omni_conversation_equals_one_joint_call() -> None:
    items = [
        audio(1),
        image(2),
        video(3),
        image(4, 60, 20),
        audio(5, 2.5),
        video(6, 8, 64, 24),
        image(7, 3, 50),
    ]
    assert_joint(OMNI, interleaved("audio", "image", "video", "image", "audio", "video", "image"), items)


def test_qwen_vl_conversation_equals_one_joint_call() -> None:
    items = [video(1), image(2), image(3, 60, 20), video(4, 9, 64, 24), image(5)]
    assert_joint(qwen_vl(), interleaved("video", "image", "image", "video", "image"), items)


def test_qwen3_vl_conversation_equals_one_joint_call() -> None:
    items = [video(1), image(2), video(3, 9, 64, 24), image(4, 60, 20)]
    assert_joint(qwen3_vl(), interleaved("video", "image", "video", "image"), items)


@pytest.mark.parametrize("model", MODELS)
def test_images_of_one_size_equal_one_joint_call(model: str) -> None:
    # The processor batches images of one size.
    items = [image(seed, 64, 64) for seed in range(5)]
    assert_joint(MODELS[model](), chat(*(media for media, _ in items), "How many?"), items)


@pytest.mark.parametrize("model", MODELS)
def test_text_alone_equals_one_joint_call(model: str) -> None:
    assert_joint(MODELS[model](), chat("Who are you?"), [])


def test_features_take_the_dtype_of_the_model_but_seconds_do_not() -> None:
    import torch

    from deployments.engine.inputs import assemble

    media, arrays = video(1)
    prompt = tokenizer(OMNI).encode(chat(media))
    inputs = assemble(prompt, [engine_item(OMNI, media, arrays)], accepts(OMNI), torch.bfloat16)
    assert inputs["pixel_values_videos"].dtype == torch.bfloat16
    assert inputs["video_second_per_grid"].dtype == torch.float32


def test_features_the_model_does_not_take_are_left_out() -> None:
    import torch

    from deployments.engine.inputs import assemble

    media, arrays = image(1)
    prompt = tokenizer(OMNI).encode(chat(media))
    inputs = assemble(prompt, [engine_item(OMNI, media, arrays)], {"pixel_values"}, torch.float32)
    assert inputs.keys() == {"input_ids", "attention_mask", "pixel_values"}


def test_features_that_do_not_join_are_an_error_not_a_wrong_input() -> None:
    import torch

    from deployments.engine.inputs import assemble

    (first, arrays), (second, _) = image(1), image(2)
    prompt = tokenizer(OMNI).encode(chat(first, second))
    good = engine_item(OMNI, first, arrays)
    odd = replace(good, arrays=good.arrays | {"pixel_values": np.zeros((4, 6), np.uint8)})
    with pytest.raises(ServingError, match="pixel_values"):
        assemble(prompt, [good, odd], accepts(OMNI), torch.float32)
