"""Measures tiny-omni on media that it has never seen.

    python -m scripts.eval_tiny_omni [--model DIR] [--n 200]

Each prompt takes the way of a request: chat template, processor, greedy generation. An answer is right only
if every letter is right, with every item named and in order. "items" is the share of items with the right
name in the right place.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from transformers import AutoModelForMultimodalLM, AutoProcessor

from scripts.tiny_omni.conversations import Conversation, Draw, make_conversation
from scripts.tiny_omni.features import process
from scripts.tiny_omni.language_model import SUITES
from tests.support.synthetic_media import Item, Modality, make_audio, make_clip, make_image, make_item

MODEL = Path(__file__).parent.parent / "deployments" / "tiny_omni"
SEED = 2025  # training uses 0, its progress report 1


def unseen_draw(seed: int) -> Draw:
    """Draws item after item of a seed."""
    index = 0

    def draw(modality: Modality, rng: Generator) -> tuple[Any, str]:
        nonlocal index
        index += 1
        item = make_item(modality, seed, index)
        return item.data, item.label

    return draw


def special_draw(make: Callable[[Generator], Item]) -> Draw:
    """Draws items of one special make."""

    def draw(modality: Modality, rng: Generator) -> tuple[Any, str]:
        item = make(rng)
        return item.data, item.label

    return draw


SPECIAL: dict[str, tuple[Modality, Callable[[Generator], Item]]] = {
    "image of 4000 x 3000": ("image", lambda rng: make_image(rng, size=(4000, 3000))),
    "image of 1024 x 768": ("image", lambda rng: make_image(rng, size=(1024, 768))),
    "image of 40 x 40": ("image", lambda rng: make_image(rng, size=(40, 40))),
    "audio of 0.3 s": ("audio", lambda rng: make_audio(rng, seconds=0.3)),
    "audio of 10 s": ("audio", lambda rng: make_audio(rng, seconds=10.0)),
    "audio of 30 s": ("audio", lambda rng: make_audio(rng, seconds=30.0)),
    "1280 x 720 H.264 video": (
        "video",
        lambda rng: make_clip(rng, size=(1280, 720), seconds=1.5, fps=24.0, codec=True),
    ),
}


@dataclass
class Score:
    """Counts of one suite."""

    prompts: int = 0
    right: int = 0
    items: dict[str, list[bool]] = field(default_factory=dict)
    misses: list[tuple[str, str]] = field(default_factory=list)

    def add(self, answer: str, wanted: str) -> None:
        """Compare an answer with the right one."""
        self.prompts += 1
        self.right += answer == wanted
        said = answer.split("; ")
        for place, part in enumerate(wanted.split("; ")):
            kind = part.split(" ", 1)[0]
            if kind in ("image", "audio", "video"):
                self.items.setdefault(kind, []).append(place < len(said) and said[place] == part)
        if answer != wanted:
            self.misses.append((wanted, answer))

    def __str__(self) -> str:
        items = " ".join(f"{kind} {np.mean(right):.3f}" for kind, right in sorted(self.items.items()))
        return f"{self.right / self.prompts:.3f} of {self.prompts}  items: {items or '-'}"


class Model:
    """A model folder, loaded without a network."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        self.model = AutoModelForMultimodalLM.from_pretrained(folder, local_files_only=True).eval()

    def answer(self, messages: list[dict[str, Any]], items: list[tuple[Modality, Any]] | None = None) -> str:
        """Returns the answer to `messages`, whose media are `items`: (modality, data) in order."""
        inputs = process(self.processor, messages, items or [])
        out = self.model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
        return str(self.processor.decode(out, skip_special_tokens=True))


def suites(n: int) -> Iterator[tuple[str, Iterator[Conversation]]]:
    """Every suite with its `n` conversations."""
    for number, (name, suite) in enumerate(SUITES.items()):
        rng, draw = np.random.default_rng([SEED, number]), unseen_draw(SEED + number)
        yield name, (suite(rng, draw) for _ in range(n))
    for number, (name, (modality, make)) in enumerate(SPECIAL.items()):
        rng, draw = np.random.default_rng([SEED, 100 + number]), special_draw(make)
        yield (
            name,
            (make_conversation(rng, draw, 1, [modality], "all", "single") for _ in range(n)),
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--n", type=int, default=200, help="prompts in each suite")
    parser.add_argument("--only", help="suites whose name contains this")
    parser.add_argument("--misses", type=int, default=0, help="wrong answers to show of each suite")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(args.model)
    for name, conversations in suites(args.n):
        if args.only and args.only not in name:
            continue
        score, start = Score(), time.monotonic()
        for talk in conversations:
            score.add(model.answer(talk.messages[:-1], talk.items), talk.answer)
        print(
            f"{name:34s} {score}  ({(time.monotonic() - start) / score.prompts * 1000:.0f} ms each)",
            flush=True,
        )
        for wanted, answer in score.misses[: args.misses]:
            print(f"    wanted {wanted!r}\n    said   {answer!r}")


if __name__ == "__main__":
    main()
