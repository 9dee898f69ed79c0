"""What a client or a media host did wrong is news for the client; in the log it is one line, no traceback."""

from __future__ import annotations

import logging

from deployments.errors import ServingError


def log_refusals_in_one_line() -> None:
    """Call it in each process of a stage: Serve logs whatever a call raises as an error of the server."""
    logger = logging.getLogger("ray.serve")
    if not any(isinstance(present, _Refusals) for present in logger.filters):
        logger.addFilter(_Refusals())


class _Refusals(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ServingError) and error.status != ServingError.status:
            record.msg, record.args = "refused with %d: %s", (error.status, error.message)
            record.exc_info = None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True
