"""The `args` of serve_config.yaml. Each stage defines its settings; this module combines and checks them.

Serve itself ignores unknown keys silently, so the models here refuse them by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from app.http.auth import key_digests
from app.http.settings import ApiSettings
from app.openai.requests import MediaIOKwargs
from deployments.processor.checkpoint import resolve
from deployments.stages.base import StageConfig
from deployments.stages.embedding_loader import EmbeddingLoaderConfig
from deployments.stages.media_loader import MediaLoaderConfig
from deployments.stages.mm_preprocessor import MMPreprocessorConfig
from deployments.stages.model import ModelConfig
from deployments.stages.tokenizer import TokenizerConfig
from deployments.types import Modality

SET_AT_TOP = ("model", "chat_template", "otlp_endpoint")  # and given to the stages that have them


class AppConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = Field(
        default="tiny-omni",
        description="The checkpoint: `tiny-omni`, which ships with Headrace, a folder, or a name on the"
        " Hugging Face hub.",
    )
    chat_template: str = Field(
        default="", description="A file with a chat template that replaces the checkpoint's. Empty: not used."
    )
    served_model_name: str = Field(
        default="", description="The name that clients use. Empty: the last part of `model`."
    )
    timeout_s: float = Field(default=120.0, gt=0, description="Deadline of a request, in seconds.")
    max_body_bytes: int = Field(
        default=256 * 2**20, gt=0, description="Largest request body, in bytes. A larger one gets a 413."
    )
    max_inflight_body_bytes: int = Field(
        default=2**30,
        gt=0,
        description="Bytes of request bodies that one `Ingress` replica may hold at once. Beyond that a"
        " request gets a 503.",
    )
    body_idle_timeout_s: float = Field(
        default=20.0,
        gt=0,
        description="Seconds without any new byte of a body after which its request gets a 408.",
    )
    max_media_bytes: int = Field(
        default=512 * 2**20,
        gt=0,
        description="Bytes of all items of a request in total, as sent or fetched. More gets a 413.",
    )
    media_io_kwargs: MediaIOKwargs = Field(
        default_factory=MediaIOKwargs,
        description="Defaults for the `media_io_kwargs` of requests.",
    )
    limit_mm_per_prompt: dict[Modality, NonNegativeInt] = Field(
        default_factory=lambda: dict.fromkeys(Modality, 999),
        description="Items of each modality that a request may have. They are counted before anything is"
        " fetched. A modality that is not named has no limit.",
    )
    enable_mm_embeds: bool = Field(
        default=False, description="Accept `image_embeds`, `audio_embeds` and `video_embeds` parts."
    )
    enable_prompt_embeds: bool = Field(default=False, description="Accept `prompt_embeds` parts.")
    enable_reset_mm_cache: bool = Field(
        default=False,
        description="Offer `POST /reset_mm_cache`, which empties the caches of media and of processed items.",
    )
    page: bool = Field(default=True, description="Serve the page at `/`.")
    api_keys_file: str = Field(
        default="",
        validate_default=True,
        description="A file with one API key a line. Empty: no file. See [API keys](operations.md#api-keys).",
    )
    cors_allow_origins: list[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]] = Field(
        default_factory=list,
        description="Origins whose pages may call the API from a browser: `https://chat.example.org`, or"
        ' `"*"`.',
    )
    otlp_endpoint: str = Field(
        default="",
        pattern=r"^(https?://\S+)?$",
        description="Address of an OTLP/HTTP collector for [traces](operations.md#traces), such as"
        " `http://localhost:4318`. Empty: no traces.",
    )

    media_loader: MediaLoaderConfig = Field(default_factory=MediaLoaderConfig)
    embedding_loader: EmbeddingLoaderConfig = Field(default_factory=EmbeddingLoaderConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    mm_preprocessor: MMPreprocessorConfig = Field(default_factory=MMPreprocessorConfig)
    engine: ModelConfig = Field(default_factory=ModelConfig)

    @model_validator(mode="before")
    @classmethod
    def _share_top_level_settings(cls, data: Any) -> Any:
        """Gives each stage the top-level settings that it needs: model, chat template, collector."""
        if not isinstance(data, dict):
            return data
        shared = {
            "model": _resolved_model(data.get("model", cls.model_fields["model"].default)),
            "chat_template": _resolved_file(data.get("chat_template", "")),
            "otlp_endpoint": data.get("otlp_endpoint", ""),
        }
        stages = {}
        for name, config in _stage_configs().items():
            stages[name] = _section(data, name) | {
                setting: value
                for setting, value in shared.items()
                if setting in config.model_fields and value
            }
        return {**data, **stages}

    @field_validator("api_keys_file")
    @classmethod
    def _check_keys(cls, file: str) -> str:
        key_digests(file)  # also reads the keys in the environment
        return file

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.max_inflight_body_bytes < self.max_body_bytes:
            raise ValueError("max_inflight_body_bytes must be at least max_body_bytes")
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


def _stage_configs() -> dict[str, type[StageConfig]]:
    """Returns the class of each stage's section, by its name."""
    fields = {name: field.annotation for name, field in AppConfig.model_fields.items()}
    return {
        name: config
        for name, config in fields.items()
        if isinstance(config, type) and issubclass(config, StageConfig)
    }


def _section(data: dict[str, Any], stage: str) -> dict[str, Any]:
    """Returns a copy of a stage's settings, without settings that only the top level may have."""
    section = data.get(stage) or {}  # an empty section of the YAML is None
    if not isinstance(section, dict):
        raise ValueError(f"{stage} must be a mapping of settings")
    for name in SET_AT_TOP:
        if name in section:
            raise ValueError(f"{stage}.{name} cannot be set here; set {name} at the top level")
    return dict(section)


def _resolved_model(model: object) -> object:
    """Checks that a bundled model or a folder is there, and makes a folder's path absolute."""
    if not isinstance(model, str):
        return model  # refused by its field
    try:
        resolve(model)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    # Replicas have another working directory.
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _resolved_file(template: object) -> object:
    """Checks that a file is there, and makes its path absolute."""
    if not isinstance(template, str) or not template:
        return template  # not set, or refused by its field
    path = Path(template).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template: there is no file {template!r}")
    return str(path.resolve())
