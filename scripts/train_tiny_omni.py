"""Trains tiny-omni, the default model, from nothing: `python -m scripts.train_tiny_omni --out DIR`.

The model is a `Qwen2_5OmniThinkerForConditionalGeneration` with about two million parameters. It names
coloured shapes, sounds and motions (see tests/support/synthetic_media.py). The tokenizer, the chat template,
the processor configuration and the weights are all made here.

The schedule counts steps and every draw is seeded, so that one machine always makes the same weights:

1. Make a pool of items in the size that the encoders see.
2. Train the encoders alone, each with temporary heads on a weighted mean of its output tokens.
3. Train the language model on conversations over the frozen features of the pool, with one item at first
   and up to twenty later. At first every item is averaged to two tokens, with which the model soon learns
   which ordinal belongs to which item; then it gets all tokens.
4. Train the whole model together for a while.
"""

import argparse
import ctypes
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from scripts.tiny_omni.checkpoint import make_model, make_processor, save
from scripts.tiny_omni.encoders import ENCODER_STEPS, train_encoders
from scripts.tiny_omni.features import make_pool
from scripts.tiny_omni.language_model import POOL_SIZES, STAGES, train_conversations
from tests.support.synthetic_media import (
    MODALITIES,
)

log = logging.getLogger("train_tiny_omni")


def train(out: Path, scale: float) -> None:
    """The whole schedule; `scale` shortens every part of it, for a trial."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # faster than two: the matrices are small
    _keep_memory()
    clock = time.monotonic()
    processor = make_processor()
    model = make_model(processor)
    for part in (model.model.visual, model.model.audio_tower):
        part.config._attn_implementation = "packed_flash"

    def scaled(number: int) -> int:
        return max(20, round(number * scale))

    pool = make_pool(0, {modality: scaled(number) for modality, number in POOL_SIZES.items()})
    held_out = make_pool(1, dict.fromkeys(MODALITIES, scaled(300)))
    log.info("pools ready after %.0f s", time.monotonic() - clock)
    train_encoders(model, pool, held_out, scaled(ENCODER_STEPS))
    log.info("encoders ready after %.0f s", time.monotonic() - clock)
    for stage in STAGES:
        train_conversations(model, processor, pool, held_out, replace(stage, steps=scaled(stage.steps)))
        save(model, processor, out)
        log.info("stage ready after %.0f s", time.monotonic() - clock)


def _keep_memory() -> None:
    """Have glibc keep freed memory: page faults on large tensors take a quarter of the time otherwise."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="share of the schedule, for a trial")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(args.out, args.steps_scale)


if __name__ == "__main__":
    main()
