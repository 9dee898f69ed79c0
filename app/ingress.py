"""The ingress deployment: handles to the stages → pipeline → ASGI app, all inside one Serve replica."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from tokenizers import Tokenizer

from app.fanout import Pipeline, Stages
from app.http.routes import create_app
from app.http.settings import ApiSettings
from app.readiness import missing_stages
from deployments.runtime import tracing
from deployments.runtime.logs import set_up_logs
from deployments.runtime.memory import freeze_start_up, reuse_memory
from deployments.runtime.metrics import publish


@serve.ingress()
class Ingress:
    """Not ready before every stage has answered, and so never ready where one fails to start."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: ApiSettings,
        tokenizer: Any,
        media: Any,
        embeddings: Any,
        preprocessor: Any,
        model: Any,
    ) -> None:
        text, inputs, limits, *_ = await asyncio.gather(
            tokenizer.describe.remote(),
            preprocessor.describe.remote(),
            model.describe.remote(),
            media.ready.remote(),
            embeddings.ready.remote(),
        )
        set_up_logs()
        tracing.start(settings.otlp_endpoint, "Ingress")
        self._settings = settings
        self._handles = (tokenizer, media, embeddings, preprocessor, model)
        self._pipeline = Pipeline(
            Stages(tokenizer, media, embeddings, preprocessor, model, text, inputs, limits)
        )
        self._pipeline.watch.start()
        publish()
        self._tokenizer = Tokenizer.from_str(text.tokenizer_json)
        reuse_memory()
        freeze_start_up()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(
            self._pipeline, self._tokenizer, partial(missing_stages, self._handles), self._settings
        )
