"""Messages and fields of requests."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.cluster import Answer, Server
from tests.support.media_files import encoded, flat_image
from tests.support.requests import COMPLETIONS, RENDER, chat, data_uri, image_part

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def test_empty_contents_are_accepted_and_missing_ones_refused(server: Server) -> None:
    red = image_part("red")
    hello = {"role": "user", "content": "hello"}
    accepted: list[list[dict[str, Any]]] = [
        [hello, {"role": "assistant", "content": ""}, hello],
        [hello, {"role": "assistant"}, hello],
        [{"role": "system", "content": ""}, hello],
        [{"role": "system", "content": []}, hello],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text", "text": ""}]}],
        [{"role": "user", "content": " \n\t "}],
        [{"role": "user", "content": [{"type": "text", "text": ""}, red]}],
        [{"role": "user", "content": [red]}, {"role": "assistant", "content": ""}, hello],
    ]
    for messages in accepted:
        answer = server.post(COMPLETIONS, {"messages": messages, "max_tokens": 2})
        assert answer.status == 200, (messages, answer.body)
    for message in ({"role": "user"}, {"role": "system", "content": None}, {"content": "A"}):
        server.post(COMPLETIONS, {"messages": [message]}).refusal(status=(400,))
    server.post(COMPLETIONS, {"messages": []}).refusal("messages", (400,))


def test_a_string_and_one_text_part_render_alike(server: Server) -> None:
    def content(text: str, as_parts: bool) -> object:
        return [{"type": "text", "text": text}] if as_parts else text

    prompts = set()
    for which in range(8):
        roles = (("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "bye"))
        messages = [
            {"role": role, "content": content(text, bool(which >> i & 1))}
            for i, (role, text) in enumerate(roles)
        ]
        answer = server.post(RENDER, {"messages": messages})
        prompts.add(tuple(answer.body["prompt_token_ids"]))
    assert len(prompts) == 1


def test_the_developer_role_renders_as_the_system_role(server: Server) -> None:
    def prompt(role: str) -> Answer:
        messages = [
            {"role": role, "content": "answer only BANANA"},
            {"role": "user", "content": "capital of France?"},
        ]
        return server.post(RENDER, {"messages": messages})

    developer, system = prompt("developer"), prompt("system")
    assert developer.body["prompt_token_ids"] == system.body["prompt_token_ids"]
    prompt("banana").refusal("messages[0].role", (400,))


OPTIONAL = (
    *("model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_completion_tokens", "n"),
    *("presence_penalty", "response_format", "seed", "service_tier", "stop", "stream", "stream_options"),
    *("top_p", "tools", "tool_choice", "parallel_tool_calls", "user", "functions", "function_call", "store"),
    *("metadata", "modalities", "audio", "prediction", "reasoning_effort", "media_io_kwargs", "verbosity"),
)


def test_null_means_absent_and_unknown_keys_change_nothing(server: Server) -> None:
    url = data_uri("image/png", encoded(flat_image("red")))

    def said(part: dict[str, object], message: dict[str, object], **fields: object) -> str:
        content = [{"type": "image_url", "image_url": {"url": url}} | part, {"type": "text", "text": "what?"}]
        body = {
            "messages": [{"role": "user", "content": content} | message],
            "temperature": 0,
            "max_tokens": 8,
            **fields,
        }
        answer = server.post(COMPLETIONS, body)
        assert answer.status == 200, answer.body
        return str(answer.body["choices"][0]["message"]["content"])

    plain = said({}, {})
    for detail in (None, "low", "auto", "high", "ultra"):
        assert said({"image_url": {"url": url, "detail": detail}}, {}) == plain
    assert said({}, {}, **dict.fromkeys(OPTIONAL)) == plain
    assert said({"x_unknown": 1, "cache_control": {"type": "ephemeral"}}, {}) == plain
    assert said({"image_url": {"url": url, "x_unknown": [1]}}, {}) == plain
    assert said({}, {"name": "ann", "x_unknown": {}, "tool_calls": None}) == plain
    extra = {"user": "u", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False, "x_unknown": 1}
    assert said({}, {}, **extra) == plain


def test_a_text_beyond_a_grpc_message_has_a_clear_error(server: Server) -> None:
    start = time.monotonic()
    answer = server.post(COMPLETIONS, chat("a" * 4_300_000))
    assert answer.status == 400
    assert answer.body["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - start < 5
