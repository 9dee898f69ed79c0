"""The whole graph: six deployments, each in processes of its own, bound in one place."""

# No `from __future__ import annotations`: Serve reads the class that `args` must validate against.
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from app.config import AppConfig
from app.ingress import Ingress
from deployments.stages.embedding_loader import EmbeddingLoader
from deployments.stages.media_loader import MediaLoader
from deployments.stages.mm_preprocessor import MMPreprocessor
from deployments.stages.model import Model
from deployments.stages.tokenizer import Tokenizer

# Calls about the same content go to the same replica. A string, since routers live in other processes.
_BY_CONTENT = RequestRouterConfig(request_router_class="deployments.runtime.affinity:AffinityRouter")


def build(args: AppConfig) -> Application:
    """Builds the application. serve_config.yaml names it, and sets replicas, CPUs and queue lengths."""
    return _deployment(Ingress).bind(
        args.api,
        Tokenizer=_deployment(Tokenizer).bind(args.tokenizer),
        MediaLoader=_deployment(MediaLoader, _BY_CONTENT).bind(args.media_loader),
        EmbeddingLoader=_deployment(EmbeddingLoader).bind(args.embedding_loader),
        MMPreprocessor=_deployment(MMPreprocessor, _BY_CONTENT).bind(
            args.mm_preprocessor, args.media_loader.decoder
        ),
        Model=_deployment(Model).bind(args.engine),
    )


DEPLOYMENTS = [
    cls.__name__ for cls in (Ingress, Tokenizer, MediaLoader, EmbeddingLoader, MMPreprocessor, Model)
]


def _deployment(cls: type, router: RequestRouterConfig | None = None) -> Deployment:
    """Sets defaults that suit every stage. With Serve's own, 5 requests at once, items would queue."""
    return serve.deployment(
        cls,
        name=cls.__name__,
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0.1},
        max_surge_percent=0,
        request_router_config=router or RequestRouterConfig(),
    )
