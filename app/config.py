"""`args` of serve_config.yaml. Each stage owns its settings; here they are put together and checked.

Serve itself drops unknown keys without a word, so everything here refuses them by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from app.http.auth import key_digests
from app.http.settings import ApiSettings
from app.openai.requests import MediaIOKwargs
from deployments.processor.checkpoint import resolve
from deployments.stages.embedding_loader import EmbeddingLoaderConfig
from deployments.stages.media_loader import MediaLoaderConfig
from deployments.stages.mm_preprocessor import MMPreprocessorConfig
from deployments.stages.model import ModelConfig
from deployments.stages.tokenizer import TokenizerConfig
from deployments.types import Modality

_STAGES = ("media_loader", "embedding_loader", "tokenizer", "mm_preprocessor", "engine")
_OF_TEMPLATE = ("tokenizer", "mm_preprocessor")
_OF_MODEL = ("tokenizer", "mm_preprocessor", "engine")  # stages that load the checkpoint


class AppConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = "tiny-omni"  # shipped with the repo, or a folder, or a name on the Hugging Face hub
    chat_template: str = ""  # a file with one to use instead of the checkpoint's
    served_model_name: str = ""  # what clients call it; the last part of `model` where empty
    timeout_s: float = Field(default=120.0, gt=0)  # a request's deadline
    max_body_bytes: int = Field(default=256 * 2**20, gt=0)
    max_inflight_body_bytes: int = Field(default=2**30, gt=0)  # of all requests, in each replica of Ingress
    body_idle_timeout_s: float = Field(default=20.0, gt=0)
    max_media_bytes: int = Field(default=512 * 2**20, gt=0)  # all items of a request, as sent or fetched
    media_io_kwargs: MediaIOKwargs = Field(default_factory=MediaIOKwargs)  # where a request says nothing else
    limit_mm_per_prompt: dict[Modality, NonNegativeInt] = Field(
        default_factory=lambda: dict.fromkeys(Modality, 999)
    )  # items of a request; a modality that is not named has no limit
    enable_mm_embeds: bool = False  # whether image_embeds, audio_embeds and video_embeds are taken
    enable_prompt_embeds: bool = False
    enable_reset_mm_cache: bool = False  # whether POST /reset_mm_cache is there
    page: bool = True  # the page at /
    api_keys_file: str = Field(default="", validate_default=True)  # one a line; and see app/http/auth.py
    cors_allow_origins: list[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]] = Field(
        default_factory=list
    )  # pages of these origins may ask; *: all
    otlp_endpoint: str = Field(default="", pattern=r"^(https?://\S+)?$")  # of a collector of traces

    media_loader: MediaLoaderConfig = Field(default_factory=MediaLoaderConfig)
    embedding_loader: EmbeddingLoaderConfig = Field(default_factory=EmbeddingLoaderConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    mm_preprocessor: MMPreprocessorConfig = Field(default_factory=MMPreprocessorConfig)
    engine: ModelConfig = Field(default_factory=ModelConfig)

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, data: Any) -> Any:
        """The stages that load the checkpoint all get the one `model`, those that write prompts the one
        `chat_template`, and all the one `otlp_endpoint`.
        """
        if not isinstance(data, dict):
            return data
        model = data.get("model", cls.model_fields["model"].default)
        if isinstance(model, str):
            try:
                resolve(model)
            except FileNotFoundError as error:
                raise ValueError(str(error)) from None
            if Path(model).is_dir():
                model = str(Path(model).resolve())  # replicas have a working directory of their own
        stages = {stage: {**data.get(stage, {}), "model": model} for stage in _OF_MODEL}
        template = data.get("chat_template")
        if isinstance(template, str) and template:
            if not Path(template).expanduser().is_file():
                raise ValueError(f"chat_template: there is no file {template!r}")
            for stage in _OF_TEMPLATE:
                stages[stage]["chat_template"] = str(Path(template).expanduser().resolve())
        if endpoint := data.get("otlp_endpoint"):
            for stage in _STAGES:
                stages[stage] = {**data.get(stage, {}), **stages.get(stage, {}), "otlp_endpoint": endpoint}
        return {**data, **stages}

    @field_validator("api_keys_file")
    @classmethod
    def _keys_can_be_read(cls, file: str) -> str:
        key_digests(file)  # and those of the environment
        return file

    @model_validator(mode="after")
    def _is_meant(self) -> Self:
        if self.max_inflight_body_bytes < self.max_body_bytes:
            raise ValueError("max_inflight_body_bytes must hold at least one body of max_body_bytes")
        self.served_model_name = self.served_model_name or self.model.rstrip("/").rpartition("/")[2]
        return self

    @property
    def api(self) -> ApiSettings:
        return ApiSettings(
            model_name=self.served_model_name,
            timeout_s=self.timeout_s,
            max_body_bytes=self.max_body_bytes,
            max_inflight_body_bytes=self.max_inflight_body_bytes,
            body_idle_timeout_s=self.body_idle_timeout_s,
            max_media_bytes=self.max_media_bytes,
            media_io_kwargs=self.media_io_kwargs,
            limit_mm_per_prompt=self.limit_mm_per_prompt,
            enable_mm_embeds=self.enable_mm_embeds,
            enable_prompt_embeds=self.enable_prompt_embeds,
            enable_reset_mm_cache=self.enable_reset_mm_cache,
            page=self.page,
            api_keys=key_digests(self.api_keys_file),
            cors_allow_origins=self.cors_allow_origins,
            otlp_endpoint=self.otlp_endpoint,
        )
