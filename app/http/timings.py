"""Where a request's time went: `timings_ms` of answers, and the Server-Timing header.

All of it is read from the request's one clock, from when its head was read to when its answer is made:

    total = intake + validate + prepare + join + queue + prefill + decode + finish

where `prepare` is the longest of the prompt's and the items' ways, which are side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.calls import Deadline, Timing
from app.fanout import Prepared
from deployments.types import Delta

_FIRST_KNOWN = ("intake", "validate", "prepare", "join", "queue", "prefill")


@dataclass(slots=True)
class Timings:
    """Of one request, in milliseconds; of what is not there yet nothing is told."""

    clock: Deadline
    intake: float  # until the body was there and parsed
    prepared: Prepared
    first: float = 0.0  # when the first tokens came
    last: float = 0.0  # when the last ones did
    prefill: float = 0.0  # as the engine tells

    def saw(self, delta: Delta) -> None:
        self.last = self.clock.ms()
        if not self.first:
            self.first = self.last
            self.prefill = min(delta.prefill_ms, self.first - self.prepared.ready)

    def phases(self) -> dict[str, float]:
        """One after the other; together they are the last one, `total`."""
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

    def to_json(self) -> dict[str, Any]:
        """Without the items: see `of_stages`."""
        phases = self.phases()
        del phases["prepare"]
        told: dict[str, Any] = phases | {"tokenize": self.prepared.tokenize.to_json()}
        if self.first:
            model = {name: told.pop(name) for name in ("queue", "prefill", "decode")}
            told["model"] = {"start": round(self.prepared.ready, 3)} | model
        return told

    def with_items(self) -> dict[str, Any]:
        items = [
            {
                "param": entry.item.param,
                "modality": entry.item.modality or "prompt",
                **of_stages(entry.timings),
            }
            for entry in self.prepared.items
        ]
        return self.to_json() | {"items": items}

    def header(self) -> dict[str, str]:
        return server_timing(self.phases())

    def first_header(self) -> dict[str, str]:
        """Of an answer that goes on."""
        phases = self.phases()
        return server_timing({name: phases[name] for name in _FIRST_KNOWN})


def of_stages(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """Of an item, in the order in which it went through them."""
    return {stage: timing.to_json() for stage, timing in timings.items()}


def server_timing(phases: Mapping[str, float]) -> dict[str, str]:
    """The W3C's header."""
    return {"Server-Timing": ", ".join(f"{name};dur={ms:.1f}" for name, ms in phases.items())}
