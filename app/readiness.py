"""Whether every stage can serve, as Serve's controller sees it; asked in the background, not by requests."""

from __future__ import annotations

import asyncio
import logging

from ray import serve
from ray.exceptions import RayError

logger = logging.getLogger("ray.serve")


class Readiness:
    """Until the first answer of the controller, and whenever it cannot be had, the last one holds."""

    def __init__(self, app_name: str, period_s: float = 1.0) -> None:
        self.reason: str | None = None  # why not, or None when all can serve
        self._app_name = app_name
        self._task = asyncio.create_task(self._watch(period_s))

    async def _watch(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                reason = await asyncio.to_thread(missing_stages, self._app_name)
            except RayError:
                logger.warning("The controller does not answer; readiness is as before.")
                continue
            if reason != self.reason:
                logger.info("Readiness: %s", reason or "every stage can serve")
            self.reason = reason


def missing_stages(app_name: str) -> str | None:
    """Names the deployments without a running replica."""
    application = serve.status().applications.get(app_name)
    if application is None:
        return "the application is not deployed"
    missing = [
        name
        for name, deployment in application.deployments.items()
        if deployment.replica_states.get("RUNNING", 0) == 0
    ]
    return f"no running replica of {', '.join(missing)}" if missing else None
