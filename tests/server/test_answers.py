"""Answers: streams, usage and token limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.cluster import Server
from tests.support.media_files import sound
from tests.support.requests import COMPLETIONS, chat, data_uri, image_part, media

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])


def test_a_stream_joins_to_the_whole_text_without_split_characters(server: Server) -> None:
    """Hot sampling without an end makes tokens of single bytes; the seed makes both runs equal."""
    with ThreadPoolExecutor(4) as pool:

        def both(max_tokens: int) -> tuple[str, str]:
            hot = {"temperature": 2, "seed": max_tokens, "ignore_eos": True, "max_tokens": max_tokens}
            whole = server.ask("emoji", **hot).body["choices"][0]["message"]["content"]
            return whole, text_of(server.stream("emoji", **hot))

        results = list(pool.map(both, range(1, 21)))
    assert all(whole == streamed for whole, streamed in results)


def test_usage_is_one_chunk_without_a_choice(server: Server) -> None:
    requests: list[list[object]] = [
        ["hello"],
        [image_part("red"), "what?"],
        [media("audio", data_uri("audio/wav", sound(1))), "what?"],
    ]
    for content in requests:
        first = server.ask(*content, max_tokens=3).body["usage"]
        chunks = server.stream(*content, max_tokens=3, stream_options={"include_usage": True})
        (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        for counts in (first, usage):
            # The second request finds the prefix of the first.
            counts["prompt_tokens_details"].pop("cached_tokens")
        assert usage == first
        assert chunks[-1]["choices"] == []
        assert all(chunk["choices"] for chunk in chunks[:-1])
        assert all(c["choices"] and not c.get("usage") for c in server.stream(*content, max_tokens=3))
    several = server.ask("hello", n=2, max_tokens=3, ignore_eos=True).body
    assert (len(several["choices"]), several["usage"]["completion_tokens"]) == (2, 6)
    server.ask("hello", n=0).refusal("n", (400,))


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 50}, 5),
        ({"max_completion_tokens": 50, "max_tokens": 5}, 5),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, None),
        ({"max_completion_tokens": 0}, None),
        ({"max_tokens": "5"}, None),
    ],
    ids=str,
)
def test_the_smaller_token_limit_holds_and_an_invalid_one_is_refused(
    server: Server, fields: dict[str, object], limit: int | None
) -> None:
    answer = server.post(COMPLETIONS, chat("hello", ignore_eos=True, **fields))
    if limit is None:
        answer.refusal(next(iter(fields)), (400,))
    else:
        assert answer.body["usage"]["completion_tokens"] == limit
        assert answer.body["choices"][0]["finish_reason"] == "length"


def test_a_token_limit_beyond_the_context_is_accepted(server: Server) -> None:
    for fields in ({"max_tokens": 10**9}, {"max_tokens": None}):
        assert server.post(COMPLETIONS, chat("hello", **fields)).status == 200
