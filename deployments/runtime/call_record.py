"""The record of the call that a stage is serving.

`deployments.stages.base.endpoint` makes one for each call. Pool threads and the fetcher add their times to
it, and the reply, the span and the log line of the call are read from it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class CallRecord:
    param: str = ""  # the item's place in the request, for the log
    service_ms: float = 0.0  # at work in pool threads
    fetch_ms: float = 0.0  # waiting for the media host


_CURRENT: ContextVar[CallRecord | None] = ContextVar("call", default=None)


def begin_call(param: str) -> CallRecord:
    """Makes a new record the current one, for this task and for tasks and pool jobs that it starts."""
    record = CallRecord(param)
    _CURRENT.set(record)
    return record


def current_call() -> CallRecord:
    """Returns the record of the current call; outside of a call, one that is thrown away."""
    return _CURRENT.get() or CallRecord()
