"""The official OpenAI client against a running server."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.cluster import Server
from tests.support.media_files import png
from tests.support.requests import data_uri

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def test_the_official_client_gets_the_same_text_whole_and_streamed(
    server: Server, client: openai.OpenAI
) -> None:
    image = data_uri("image/png", png())
    messages: list[ChatCompletionMessageParam] = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "text", "text": "what is this?"},
            ],
        }
    ]
    whole = client.chat.completions.create(model="tiny-omni", messages=messages, max_tokens=30)
    stream = client.chat.completions.create(
        model="tiny-omni",
        messages=messages,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    first, second = whole.to_dict()["usage"], chunks[-1].to_dict()["usage"]
    for usage in (first, second):
        assert isinstance(usage, dict)
        details = usage["prompt_tokens_details"]
        assert details["image_tokens"] == 9
        details["cached_tokens"] = 0  # the second request finds the prefix of the first
    assert first == second
    assert [card.id for card in client.models.list()] == ["tiny-omni"]


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    broken: ChatCompletionMessageParam = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": data_uri("image/png", b"not an image")}}],
    }
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="tiny-omni", messages=[broken])
    assert caught.value.status_code in (415, 422)
    assert caught.value.param == "messages[0].content[0]"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-7", messages=[{"role": "user", "content": "hi"}])
