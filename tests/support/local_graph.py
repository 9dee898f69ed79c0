"""The real stages behind the real API, without a cluster or a socket: in Serve's local mode."""

from __future__ import annotations

from typing import Any

import httpx
from ray import serve
from tokenizers import Tokenizer as FastTokenizer

from app.config import AppConfig
from app.fanout import FanOut
from app.http.routes import create_app
from app.http.settings import ApiSettings
from app.observe import Traffic
from app.ray_stages import connect
from app.watch import Watch
from deployments.stages.embedding_loader import EmbeddingLoader
from deployments.stages.media_loader import MediaLoader
from deployments.stages.mm_preprocessor import MMPreprocessor
from deployments.stages.model import Model
from deployments.stages.tokenizer import Tokenizer


class LocalGraph:
    def __init__(self, config: AppConfig) -> None:
        self.config = config
        self.settings: ApiSettings = config.api
        self.handles = {
            "Tokenizer": local(Tokenizer, config.tokenizer),
            "MediaLoader": local(MediaLoader, config.media_loader),
            "EmbeddingLoader": local(EmbeddingLoader, config.embedding_loader),
            "MMPreprocessor": local(MMPreprocessor, config.mm_preprocessor, config.media_loader.decoder),
            "Model": local(Model, config.engine),
        }

    async def client(self, settings: ApiSettings | None = None, **replaced: Any) -> httpx.AsyncClient:
        """`replaced`: handles to use instead, by the name of the stage."""
        traffic = Traffic()
        stages, clients = await connect(self.handles | replaced, traffic)
        app = create_app(
            FanOut(stages),
            Watch(clients, traffic),
            traffic,
            FastTokenizer.from_str(stages.tokenizer_spec.tokenizer_json),
            lambda: None,
            settings or self.settings,
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://headrace", timeout=30)


def local(cls: type, *args: object) -> Any:
    """Returns a handle to the class in local mode."""
    return serve.run(serve.deployment(cls).bind(*args), name=cls.__name__, _local_testing_mode=True)
