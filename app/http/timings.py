"""The times of a request: `timings_ms` of answers, and the Server-Timing header.

All times come from the request's one clock, from the arrival of its headers to the making of its answer:

    total = intake + validate + prepare + join + queue + prefill + decode + finish

`prepare` is as long as the slowest of the prompt and the items, which are prepared side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.fanout import Prepared
from app.openai.responses import JsonObject
from app.stages import Deadline, Timing
from deployments.types import Delta

_KNOWN_AT_FIRST_TOKEN = ("intake", "validate", "prepare", "join", "queue", "prefill")


@dataclass(slots=True)
class Timings:
    """Phases of one request in milliseconds. Those not reached yet are left out."""

    clock: Deadline
    intake: float  # until the body was read and parsed
    prepared: Prepared
    first: float = 0.0  # when the first tokens came; 0: not yet
    last: float = 0.0  # when the last ones did
    prefill: float = 0.0  # as the engine reports it

    def record(self, delta: Delta) -> None:
        self.last = self.clock.ms()
        if not self.first:
            self.first = self.last
            self.prefill = min(delta.prefill_ms, self.first - self.prepared.ready)

    def phases(self) -> dict[str, float]:
        """The phases in order; they add up to the last entry, `total`."""
        prepared, total = self.prepared, self.clock.ms()
        start = prepared.tokenize.start
        stages = [timing for item in prepared.items for timing in item.timings.values()]
        end = max(timing.end for timing in (prepared.tokenize, *stages))
        phases = {
            "intake": self.intake,
            "validate": start - self.intake,
            "prepare": end - start,
            "join": prepared.ready - end,
        }
        if self.first:
            phases |= {
                "queue": self.first - prepared.ready - self.prefill,
                "prefill": self.prefill,
                "decode": self.last - self.first,
            }
        phases |= {"finish": total - (self.last or prepared.ready), "total": total}
        return {name: round(max(0.0, ms), 3) for name, ms in phases.items()}

    def to_json(self) -> JsonObject:
        """The phases and stages of the request, without its items."""
        phases = self.phases()
        del phases["prepare"]
        timings: JsonObject = {**phases, "Tokenizer": self.prepared.tokenize.to_json()}
        if self.first:
            model = {name: timings.pop(name) for name in ("queue", "prefill", "decode")}
            timings["Model"] = {"start": round(self.prepared.ready, 3), **model}
        return timings

    def with_items(self) -> JsonObject:
        items = [
            {
                "param": entry.item.param,
                "modality": entry.item.modality or "prompt",
                **stage_timings(entry.timings),
            }
            for entry in self.prepared.items
        ]
        return self.to_json() | {"items": items}

    def header(self) -> dict[str, str]:
        return server_timing(self.phases())

    def first_header(self) -> dict[str, str]:
        """The header of a stream, which is sent with the first token."""
        phases = self.phases()
        return server_timing({name: phases[name] for name in _KNOWN_AT_FIRST_TOKEN})


def stage_timings(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """Timings of one item by stage, in the order of its way."""
    return {stage: timing.to_json() for stage, timing in timings.items()}


def server_timing(phases: Mapping[str, float]) -> dict[str, str]:
    """The Server-Timing header as the W3C defines it."""
    return {"Server-Timing": ", ".join(f"{name};dur={ms:.1f}" for name, ms in phases.items())}
