"""Logging of the stages.

Serve's log files contain every line. The terminal of `serve run` shows only warnings unless HEADRACE_VERBOSE
is set: Ray forwards each console line through three processes, which costs more CPU than the tokenizer.

An error of a client or a media host is one log line without a traceback. In JSON logs, a line about an item
has the item's place in the request as `item`, in addition to Serve's own fields.
"""

from __future__ import annotations

import logging
import os

from deployments.errors import ServingError
from deployments.runtime.call_record import current_call

VERBOSE = "HEADRACE_VERBOSE"  # environment variable


def set_up_logs() -> None:
    """Sets the logging of this process up. Serve on its own logs every error of a call with a traceback."""
    logger = logging.getLogger("ray.serve")
    if not os.environ.get(VERBOSE):
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler:  # not a file's
                handler.setLevel(logging.WARNING)
    if not any(isinstance(present, _Refusals) for present in logger.filters):
        logger.addFilter(_Refusals())


class _Refusals(logging.Filter):
    """Shortens errors that are not ours to one line, and names the item of a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if (
            item := getattr(error, "param", None) or current_call().param
        ):  # Serve logs errors in a context of its own
            record.item = item
        if isinstance(error, ServingError) and error.status != ServingError.status:
            record.msg, record.args = "refused with %d: %s", (error.status, error.message)
            record.exc_info = None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True
