"""Embeddings as clients send them."""

from __future__ import annotations

import base64
import io

import torch


def tensor2base64(tensor: torch.Tensor) -> str:
    """Does the same as the function of this name in vLLM's documentation."""
    with io.BytesIO() as buffer:
        torch.save(tensor, buffer)
        return base64.b64encode(buffer.getvalue()).decode()


def audio_embeds(num_tokens: int) -> dict[str, object]:
    """A part with random embeddings of tiny-omni's width."""
    return {"type": "audio_embeds", "audio_embeds": tensor2base64(torch.randn(num_tokens, 128))}
