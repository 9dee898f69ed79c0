"""Turns streamed token ids into text. Characters stay whole, and stop strings may span several tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from deployments.types import TokenLogprob


class LogprobEntry(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: NotRequired[list[LogprobEntry]]


class TextStream:
    """Takes token ids and returns the text that is certain by now.

    It holds back bytes of an unfinished character, and a tail that may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """`min_tokens`: the first tokens, among which a stop string does not count."""
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""
        self._tokens_before_stop = min_tokens
        self.stopped = False  # a stop string was found; later tokens are ignored

    def push(self, token_id: int) -> str:
        if self.stopped:
            return ""
        self._held += self._decoder.step(self._tokenizer, token_id) or ""
        self._tokens_before_stop -= 1
        if self._tokens_before_stop >= 0:
            return self._release(len(self._held))
        cut = min((at for s in self._stop if (at := self._held.find(s)) >= 0), default=None)
        if cut is not None:
            self.stopped = True
            return self._release(cut)
        return self._release(len(self._held) - self._undecided())

    def finish(self) -> str:
        """Returns the text that was held back for a stop string that did not come."""
        return "" if self.stopped else self._release(len(self._held))

    def _undecided(self) -> int:
        """Length of the longest tail that a stop string begins with."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stop):
                return n
        return 0

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text


def logprob_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[LogprobEntry]:
    """OpenAI's `logprobs.content`: one entry for each token."""
    return [
        {
            **_entry(tokenizer, token_id, each.logprob),
            "top_logprobs": [_entry(tokenizer, *alternative) for alternative in each.top],
        }
        for token_id, each in zip(token_ids, logprobs, strict=True)
    ]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> LogprobEntry:
    content = _bytes(tokenizer, token_id)
    # JSON has no infinity. OpenAI sends -9999 for tokens that are next to impossible.
    return {
        "token": content.decode(errors="replace"),
        "logprob": max(logprob, -9999.0),
        "bytes": list(content),
    }


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The token's own bytes. Decoding alone would lose a token that is only a part of a character."""
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\ufffd" in text and all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
