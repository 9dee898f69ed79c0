"""The real stages in Serve's local mode, behind the real API, without a cluster or a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from ray import serve
from tokenizers import Tokenizer as FastTokenizer

from app.config import AppConfig
from app.fanout import Pipeline, Stages
from app.http.routes import create_app
from app.http.settings import ApiSettings
from deployments.stages.embedding_loader import EmbeddingLoader
from deployments.stages.media_loader import MediaLoader
from deployments.stages.mm_preprocessor import MMPreprocessor
from deployments.stages.model import Model
from deployments.stages.tokenizer import Tokenizer


class LocalGraph:
    def __init__(self, config: AppConfig) -> None:
        self.config = config
        self.settings: ApiSettings = config.api
        self.tokenizer = local(Tokenizer, config.tokenizer)
        self.media = local(MediaLoader, config.media_loader)
        self.embeddings = local(EmbeddingLoader, config.embedding_loader)
        self.preprocessor = local(MMPreprocessor, config.mm_preprocessor, config.media_loader.decoder)
        self.model = local(Model, config.engine)

    async def pipeline(self, **replaced: Any) -> Pipeline:
        """Stages by name, e.g. `media=`, may be replaced by others."""
        text, inputs, limits = await asyncio.gather(
            self.tokenizer.describe.remote(),
            self.preprocessor.describe.remote(),
            self.model.describe.remote(),
        )
        handles = {
            "tokenizer": self.tokenizer,
            "media": self.media,
            "embeddings": self.embeddings,
            "preprocessor": self.preprocessor,
            "model": self.model,
        }
        return Pipeline(Stages(**(handles | replaced), text=text, inputs=inputs, limits=limits))

    async def client(self, settings: ApiSettings | None = None, **replaced: Any) -> httpx.AsyncClient:
        text = await self.tokenizer.describe.remote()
        app = create_app(
            await self.pipeline(**replaced),
            FastTokenizer.from_str(text.tokenizer_json),
            lambda: None,
            settings or self.settings,
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://headrace", timeout=30)


def local(cls: type, *args: Any) -> Any:
    """A handle to the class in local mode."""
    return serve.run(serve.deployment(cls).bind(*args), name=cls.__name__, _local_testing_mode=True)
