"""What all stages have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from deployments.runtime import tracing
from deployments.runtime.logs import set_up_logs


class StageConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    otlp_endpoint: str = ""  # see deployments/runtime/tracing.py


def begin(stage: object, config: StageConfig) -> None:
    """First of all, in the stage's process."""
    set_up_logs()
    tracing.start(config.otlp_endpoint, type(stage).__name__)
