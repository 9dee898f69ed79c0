"""Settings of the HTTP API. AppConfig has the same ones, with their defaults and descriptions."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.openai.content import MM_EMBEDS_TYPES
from app.openai.requests import MediaIOKwargs
from deployments.types import Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    model_name: str
    timeout_s: float  # deadline of a request
    max_body_bytes: int
    max_inflight_body_bytes: int  # of all bodies that are being read or whose items are being loaded
    body_idle_timeout_s: float  # the longest pause of a client while it sends a body
    max_media_bytes: int = 2**63  # of all items of a request together, as sent or fetched
    media_io_kwargs: MediaIOKwargs = field(default_factory=MediaIOKwargs)  # defaults for requests
    limit_mm_per_prompt: dict[Modality, int] = field(default_factory=dict)  # a missing modality has no limit
    enable_mm_embeds: bool = False
    enable_prompt_embeds: bool = False
    enable_reset_mm_cache: bool = False
    page: bool = True  # serve the page at /
    api_keys: tuple[bytes, ...] = ()  # digests of the keys; without any, no key is needed
    cors_allow_origins: list[str] = field(default_factory=list)
    otlp_endpoint: str = ""  # collector of spans; see deployments/runtime/tracing.py

    @property
    def disabled_parts(self) -> dict[str, str]:
        """Types of content parts that are refused -> the setting that enables them."""
        disabled = {} if self.enable_mm_embeds else dict.fromkeys(MM_EMBEDS_TYPES, "enable_mm_embeds")
        return disabled if self.enable_prompt_embeds else disabled | {"prompt_embeds": "enable_prompt_embeds"}
