"""The answer of one request on its way from tokens to OpenAI's JSON, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from tokenizers import Tokenizer

from app import observe
from app.fanout import FanOut
from app.http.background import BackgroundWork
from app.http.timings import Timings
from app.openai.detokenize import TextStream, logprob_entries
from app.openai.parse_chat import sampling_params
from app.openai.requests import ChatRequest
from app.openai.responses import ChatWriter, JsonObject, Logprobs, Usage
from deployments.types import Delta


class Answer:
    """Generates the `n` choices of one request. Use either `whole` or `events`, once."""

    def __init__(
        self,
        fan_out: FanOut,
        timings: Timings,
        request: ChatRequest,
        tokenizer: Tokenizer,
        model: str,
        background: BackgroundWork,
    ) -> None:
        prepared = timings.prepared
        room = fan_out.limits.max_model_len - len(prepared.token_ids)
        self._sampling = sampling_params(request, room, fan_out.limits)
        self._fan_out = fan_out
        self._timings = timings
        self._request = request
        self._tokenizer = tokenizer
        self._texts = [TextStream(tokenizer, request.stop, request.min_tokens) for _ in range(request.n)]
        self._writer = ChatWriter(model)
        self._usage = Usage(len(prepared.token_ids), prepared.media_tokens())
        self._background = background
        self._unfinished = set(range(request.n))  # indices of choices that go on

    async def whole(self) -> JsonObject:
        parts: list[list[_Piece]] = [[] for _ in self._texts]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                parts[piece.index].append(piece)
        choices = [self._choice(part) for part in parts]
        return self._writer.completion(choices, self._usage) | self._timings_json()

    def _choice(self, part: list[_Piece]) -> JsonObject:
        text = "".join(piece.text for piece in part)
        logprobs = None
        if self._request.logprobs:
            logprobs = [entry for piece in part for entry in piece.logprobs or ()]
        return self._writer.choice(part[-1].index, text, part[-1].finish_reason or "stop", logprobs)

    async def events(self) -> AsyncGenerator[JsonObject]:
        """Chunks in OpenAI's order: role, text, finish reason, and usage if requested.

        Timings are in the last chunk.
        """
        begun, usage = set(), self._request.stream_options.include_usage
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                index = piece.index
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(index, {"role": "assistant", "content": ""})
                if piece.text or piece.logprobs:
                    yield self._chunk(index, {"content": piece.text}, logprobs=piece.logprobs)
                if piece.finish_reason:
                    end = self._chunk(index, {}, piece.finish_reason)
                    yield end if usage or self._unfinished else end | self._timings_json()
        if usage:
            yield self._writer.usage_chunk(self._usage) | self._timings_json()

    def _chunk(
        self, index: int, delta: JsonObject, reason: str | None = None, logprobs: Logprobs = None
    ) -> JsonObject:
        chunk, options = self._writer.chunk(index, delta, reason, logprobs), self._request.stream_options
        has_usage = options.include_usage and options.continuous_usage_stats
        return chunk | {"usage": self._usage.to_json()} if has_usage else chunk

    def _timings_json(self) -> JsonObject:
        return {"timings_ms": self._timings.with_items()} if self._request.timings else {}

    async def _pieces(self) -> AsyncGenerator[_Piece]:
        """Text as it becomes certain. The last piece of each choice has its finish reason."""
        unfinished, key = self._unfinished, self._writer.id
        stream = self._fan_out.generate(self._timings.prepared, self._sampling, key, self._timings.clock)
        times = observe.TokenTimes()
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                self._timings.record(delta)
                times.observe(delta)
                self._usage.cached_tokens = max(self._usage.cached_tokens, delta.cached_tokens)
                if delta.index not in unfinished:
                    continue  # tokens after a stop string, while other choices go on
                piece = self._piece(delta)
                if piece.finish_reason:
                    unfinished.remove(piece.index)
                yield piece
                if not unfinished:
                    return
                if piece.finish_reason and not delta.finish_reason:
                    # Detached, since other choices must not wait for it, and not cancelled with the request,
                    # since Serve leaves an unread exception behind when a broadcast is cancelled.
                    self._background.start(self._fan_out.end(key, piece.index))

    def _piece(self, delta: Delta) -> _Piece:
        stream = self._texts[delta.index]
        text, reason, num_used = "", delta.finish_reason, 0
        for token_id in delta.token_ids:
            text += stream.push(token_id)
            num_used += 1
            if stream.stopped:
                reason = "stop"
                break
        if reason:
            text += stream.finish()
        self._usage.completion_tokens += num_used
        logprobs = None
        if self._request.logprobs:
            logprobs = logprob_entries(self._tokenizer, delta.token_ids[:num_used], delta.logprobs[:num_used])
        return _Piece(delta.index, text, logprobs, reason)


@dataclass(frozen=True, slots=True)
class _Piece:
    index: int  # of the choice
    text: str
    logprobs: Logprobs
    finish_reason: str | None
