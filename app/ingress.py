"""The ingress deployment: handles to the stages → fan-out → ASGI app, all inside one Serve replica."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from ray import serve
from tokenizers import Tokenizer

from app.fanout import FanOut
from app.http.routes import create_app
from app.http.settings import ApiSettings
from app.observe import INGRESS, Traffic
from app.ray_stages import Handle, connect
from app.watch import Watch
from deployments.runtime import tracing
from deployments.runtime.logs import set_up_logs
from deployments.runtime.memory import freeze_start_up, reuse_memory
from deployments.runtime.metrics import publish


@serve.ingress()
class Ingress:
    """Ready once every stage has answered, and so never if one of them fails to start."""

    async def __init__(self, settings: ApiSettings, **stages: Handle) -> None:  # type: ignore[misc]  # Serve awaits it
        """`stages`: handles by stage name."""
        self._traffic = Traffic()
        connected, clients = await connect(stages, self._traffic)
        set_up_logs()
        tracing.start(settings.otlp_endpoint, INGRESS)
        self._settings = settings
        self._handles: Mapping[str, Handle] = stages
        self._fan_out = FanOut(connected)
        self._watch = Watch(clients, self._traffic)
        self._watch.start()
        publish(self._traffic.report)
        self._tokenizer = Tokenizer.from_str(connected.tokenizer_spec.tokenizer_json)
        reuse_memory()
        freeze_start_up()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(
            self._fan_out, self._watch, self._traffic, self._tokenizer, self._not_ready, self._settings
        )

    def _not_ready(self) -> str | None:
        """Returns the reason why the server cannot serve, or None.

        Looks at what Serve's controller has pushed to the handles' routers, so that nothing is called here:
        `serve.status()` holds the interpreter for 25 ms each time.
        """
        missing = [name for name, handle in self._handles.items() if not _replicas(handle)]
        return f"no running replica of {', '.join(missing)}" if missing else None


def _replicas(handle: Handle) -> object:
    return handle._router._asyncio_router.request_router.curr_replicas
