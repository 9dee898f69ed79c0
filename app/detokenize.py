"""Token ids of a stream into text: characters never split, stop strings honoured across token borders."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Feed token ids, get the text that is certain by now.

    Held back: bytes of an unfinished character, and a tail that may turn out to begin a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False  # a stop string was reached: what follows does not count

    def push(self, token_id: int) -> str:
        if self.stopped:
            return ""
        self._held += self._decoder.step(self._tokenizer, token_id) or ""
        cut = min((at for s in self._stop if (at := self._held.find(s)) >= 0), default=None)
        if cut is not None:
            self.stopped = True
            return self._release(cut)
        return self._release(len(self._held) - self._undecided())

    def finish(self) -> str:
        """What was held back only because a stop string might have come."""
        return "" if self.stopped else self._release(len(self._held))

    def _undecided(self) -> int:
        """Length of the longest tail that is a proper beginning of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stop):
                return n
        return 0

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text
