"""Choosing and loading the engine for a model."""

from __future__ import annotations

import logging
import warnings

from deployments.engine.base import Engine
from deployments.engine.config import EngineConfig
from deployments.processor.checkpoint import load_model

logger = logging.getLogger("ray.serve")


def load_engine(name: str, config: EngineConfig) -> Engine:
    """Loads the model. Uses the batched engine if it supports the model, else one request at a time."""
    # Imported here, so that a process that only needs the config does not import torch.
    import torch

    from deployments.engine.batched_engine import BatchedEngine
    from deployments.engine.batching_support import why_not_batched
    from deployments.engine.transformers_engine import TransformersEngine

    torch.set_num_threads(config.torch_threads)
    # Arrays from the object store are read-only. The engine only reads them; a test checks that.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(name, device, config.dtype)
    if reason := why_not_batched(model):
        logger.warning("%s is served one request at a time: %s", name, reason)
        return TransformersEngine(model, config)
    return BatchedEngine(model, config)
