"""What stands in the logs of the stages.

Everything is in Serve's files. Ray brings what a replica writes to its console through three processes to the
terminal of `serve run`, which takes more of a core than the tokenizer does: so there only warnings go, unless
HEADRACE_VERBOSE is set.

What a client or a media host did wrong is news for the client; in the log it is one line, no traceback. Where
logs are JSON, a line about an item names its place in the request beside Serve's own fields.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from deployments.errors import ServingError

VERBOSE = "HEADRACE_VERBOSE"  # environment variable

_ITEM: ContextVar[str] = ContextVar("item", default="")


@contextmanager
def log_context(param: str) -> Iterator[None]:
    """Lines of this call are about the item at this place of the request, and so is an error."""
    _ITEM.set(param)
    try:
        yield
    except ServingError as error:
        error.param = error.param or param
        raise


def set_up_logs() -> None:
    """Call it in each process: Serve logs whatever a call raises as an error of the server."""
    logger = logging.getLogger("ray.serve")
    if not os.environ.get(VERBOSE):
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler:  # not a file's
                handler.setLevel(logging.WARNING)
    if not any(isinstance(present, _Refusals) for present in logger.filters):
        logger.addFilter(_Refusals())


class _Refusals(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if item := getattr(error, "param", None) or _ITEM.get():  # Serve logs errors in a context of its own
            record.item = item
        if isinstance(error, ServingError) and error.status != ServingError.status:
            record.msg, record.args = "refused with %d: %s", (error.status, error.message)
            record.exc_info = None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True
