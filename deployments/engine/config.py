"""Settings of the engine. Importing them needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.processor.checkpoint import DTypeName


class EngineConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device of the model. auto: a GPU if there is one, else the CPU."
    )
    dtype: DTypeName = Field(
        default="auto",
        description="Data type of the weights. auto: the checkpoint's own on a GPU, float32 on a CPU.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Maximum tokens of prompt and answer together. null: the model's context.",
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Maximum sequences (answers) that run at once.")
    max_waiting_requests: int = Field(
        default=256,
        ge=0,
        description="Requests that may be open in addition to max_num_seqs. The next one gets a 503.",
    )
    max_num_batched_tokens: int = Field(
        default=512,
        ge=1,
        description="Maximum prompt tokens that one step prefills."
        " While other sequences decode, long prompts get a quarter of it.",
    )
    kv_cache_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of the KV cache. null: on a GPU 80 % of the memory that the weights leave,"
        " on a CPU 256 MiB or one context, whichever is larger.",
    )
    encoder_cache_bytes: int = Field(
        default=256 * 2**20,
        ge=0,
        description="Bytes of encoded media that are kept for later requests with the same media.",
    )
    torch_threads: int = Field(default=1, ge=1, description="Threads of torch on a CPU.")
