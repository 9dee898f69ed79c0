"""The whole graph: six deployments, each in processes of its own, bound in one place."""

# No `from __future__ import annotations`: Serve reads the class that `args` must validate against.
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.config import AppConfig
from app.ingress import Ingress
from deployments.stages.embedding_loader import EmbeddingLoader
from deployments.stages.media_loader import MediaLoader
from deployments.stages.mm_preprocessor import MMPreprocessor
from deployments.stages.model import Model
from deployments.stages.tokenizer import Tokenizer


def build(args: AppConfig) -> Application:
    """`import_path: app.graph:build` in serve_config.yaml; replicas, CPUs and queues are set there."""
    tokenizer = _stage(Tokenizer).bind(args.tokenizer)
    media = _stage(MediaLoader, _BY_CONTENT).bind(args.media_loader)
    embeddings = _stage(EmbeddingLoader).bind(args.embedding_loader)
    preprocessor = _stage(MMPreprocessor, _BY_CONTENT).bind(args.mm_preprocessor, args.media_loader.decoder)
    model = _stage(Model).bind(args.engine)
    return _stage(Ingress).bind(args.api, tokenizer, media, embeddings, preprocessor, model)


DEPLOYMENTS = [
    cls.__name__ for cls in (Ingress, Tokenizer, MediaLoader, EmbeddingLoader, MMPreprocessor, Model)
]

# A string: routers live in other processes.
_BY_CONTENT = RequestRouterConfig(request_router_class="deployments.runtime.affinity:AffinityRouter")


def _stage(cls: type, router: RequestRouterConfig | None = None) -> Any:
    """Defaults that suit every stage; Serve's own of 5 requests at once would queue an item behind five."""
    return serve.deployment(
        cls,
        name=cls.__name__,
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0.1},
        max_surge_percent=0,
        request_router_config=router or RequestRouterConfig(),
    )
