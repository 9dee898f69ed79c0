"""Asks a running server about mixed media that its model has never seen, and counts the right answers.

    python -m scripts.eval_served [--prompts 10] [--items 4] [--seed 7000]

Each prompt has `items` items in random order, at least one of each modality, sent as the files that a person
would send: PNG or JPEG, WAV or MP3, H.264. Prints every answer, and then the number of right items and
prompts.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.synthetic_media import Modality, make_item, write_audio, write_clip, write_image

QUESTION = "What do you see and hear?"
FILES: dict[Modality, tuple[str, ...]] = {
    "image": ("png", "jpg"),
    "audio": ("wav", "mp3"),
    "video": ("mp4",),
}
MIMES = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "mp4": "video/mp4",
}
WRITE: dict[Modality, Callable[[Path, Any], None]] = {
    "image": write_image,
    "audio": write_audio,
    "video": write_clip,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--items", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7000, help="training uses 0")
    args = parser.parse_args()
    items_right = prompts_right = 0
    for number in range(args.prompts):
        parts, wanted = prompt(args.seed + number, args.items)
        said = ask(args.url, [*parts, {"type": "text", "text": QUESTION}])
        matches = [a == b for a, b in zip(said.split("; "), wanted, strict=False)]
        items_right += sum(matches)
        prompts_right += said == "; ".join(wanted)
        print(f"{'right' if said == '; '.join(wanted) else 'WRONG'}  {said}")
        if said != "; ".join(wanted):
            print(f"wanted {'; '.join(wanted)}")
    num_items = args.prompts * args.items
    print(f"{items_right} of {num_items} items, {prompts_right} of {args.prompts} whole prompts right")


def prompt(seed: int, num_items: int) -> tuple[list[dict[str, object]], list[str]]:
    """Returns content parts, and the right answer for each."""
    rng = np.random.default_rng(seed)
    modalities: list[Modality] = ["image", "audio", "video"]
    drawn = [*modalities, *rng.choice(modalities, num_items - len(modalities))]
    parts: list[dict[str, object]] = []
    wanted, seen = [], dict.fromkeys(modalities, 0)
    for index, choice in enumerate(rng.permutation(drawn)):
        modality: Modality = str(choice)  # type: ignore[assignment]
        item = make_item(modality, seed, index)
        seen[modality] += 1
        wanted.append(f"{modality} {seen[modality]}: {item.label}")
        suffix = str(rng.choice(FILES[modality]))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"item.{suffix}")
            WRITE[modality](path, item.data)
            data = base64.b64encode(path.read_bytes()).decode()
        parts.append(
            {
                "type": f"{modality}_url",
                f"{modality}_url": {"url": f"data:{MIMES[suffix]};base64,{data}"},
            }
        )
    return parts, wanted


def ask(url: str, content: list[dict[str, object]]) -> str:
    body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 200}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
