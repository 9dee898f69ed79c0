"""Checks if the batched engine serves a model exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deployments.engine.runner import Runner
from deployments.engine.sequence import Chunk
from deployments.types import Prompt

# Families whose answers tests/deployments/engine/test_batched_engine.py compares with `generate`.
# Text models are checked by what their config says about attention.
BATCHED = frozenset(
    {
        "glm4v",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "llava_onevision",
        "ovis2",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_audio",
        "qwen2_vl",
    }
)

# Settings of a checkpoint's generation config that `generate` obeys and the sampler does not.
_ONLY_IN_GENERATE = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "sequence_bias",
    "suppress_tokens",
)


def why_not_batched(model: Any) -> str | None:
    """Returns the reason why the batched engine cannot serve the model, or None if it can."""
    config = model.config
    text = config.get_text_config()
    takes_text_only = text is config and model.input_modalities in ("text", ("text",))
    if not takes_text_only and config.model_type not in BATCHED:
        return f"the family {config.model_type} has not been tested with the batched engine"
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(text, "sliding_window", None)):
        return "its language model has layers without full attention"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention implementation is {config._attn_implementation}"
    for name in _ONLY_IN_GENERATE:
        if getattr(model.generation_config, name, None):
            return f"its generation config sets {name}"
    if not _matches_forward(model):
        return "its language model in chunks gives other logits than its own forward"
    return None


@torch.inference_mode()
def _matches_forward(model: Any) -> bool:
    """True if a text prefilled in chunks gives the logits that the model's own `forward` gives."""
    length = 24
    runner = Runner(model, num_blocks=2)
    prompt = runner.prepare(Prompt(list(range(1, 1 + length)), []), [])
    ids = torch.tensor([prompt.token_ids], device=model.device)
    expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    # Has the part of a SequenceState that the runner reads; a request needs an event loop.
    sequence: Any = SimpleNamespace(
        token_ids=prompt.token_ids, num_prompt=length, prompt=prompt, blocks=[1, 2]
    )
    pieces = (0, 10), (10, length - 1), (length - 1, length)
    logits = torch.stack([runner.forward([Chunk(sequence, *piece)])[0] for piece in pieces])
    difference = (logits - expected[[end - 1 for _, end in pieces]]).abs().max() / expected.abs().max()
    return bool(difference < (1e-3 if model.dtype == torch.float32 else 0.1))
