"""Compares items that are processed separately with one call of the processor, for each family in the tests.

python -m scripts.families            prints docs/families.md
python -m scripts.families --write    writes it; tests/scripts/test_families.py keeps it true
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

DOCS = ROOT / "docs" / "families.md"

HEAD = """\
# Families of models

`scripts/families.py` writes this page, and a test keeps it true.

Items are processed separately and in parallel. Still, the model gets bit for bit what its Hugging Face
processor returns for the whole conversation. This table shows it for a tiny processor of each family
(`tests/support/tiny_families.py`). The conversation has six messages and three items of each modality, in
different sizes. It is processed item by item, and in one call of
`processor.apply_chat_template(..., tokenize=True, return_dict=True)`. "Equal" counts the tensors, including
the token ids, that are the same in every bit.

"""

TAIL = """
- **Separately**: each item is processed in a call of its own, on any replica.
- **Jointly**: all items of this modality in a request are processed in one call, because the processor's
  result for one depends on the others. LLaVA-OneVision cuts an image into tiles only if it is alone. Gemma 3n
  and Phi-4-multimodal pad sounds to the longest before they compute the spectrum, which changes the ends of
  the shorter ones. Phi-4-multimodal also makes a mask only for several sounds.
- **Affixes**: the processor puts plain text around such an item (line breaks, times, "Frame1: "). That text
  may merge with the text next to it, so the prompt is encoded once more when the items are ready.

## Other families

Joining needs to know a family only if it has features that are not simply concatenated; the table is in
`deployments/processor/joining.py`. When `MMPreprocessor` starts, it processes a few small items of each
modality both ways (`deployments/processor/exactness.py`), with the checkpoint's own processor and template.
A modality that is not exact is left out, and the log names it, its family, and the difference. If no modality
of a model is exact, the server does not start. PaliGemma, for example, is refused: its processor changes the
text around the images.

Equal bits need `mm_preprocessor.torch_threads: 1`, the default. With more threads, torch may round
differently when the size of a batch changes, also inside the processor's own calls.

The model of GLM-4V in transformers 5.24 takes images or videos in one request, and fails on a mix of them.
SmolVLM's processor needs the package `num2words`.
"""


def document() -> str:
    rows = ["| family | processor | takes | equal | how |", "| -- | -- | -- | -- | -- |"]
    rows += [_row(family) for family in _families()]
    return HEAD + "\n".join(rows) + "\n" + TAIL


def _families() -> list[Any]:
    from tests.support.tiny_families import FAMILIES

    return list(FAMILIES)


def _row(family: Any) -> str:
    from tests.support.tiny_families import compared, conversation, samples
    from tests.support.tiny_models import item_processor

    items = item_processor(family.folder())
    items_of = samples(family)
    equal = compared(family, conversation(items_of), items_of)
    how = []
    for modality in items.spec().modalities:
        alike = [item for item in items_of if item[0].modality == modality]
        has_affixes = any(any(each.affixes) for item in alike for each in items.process([item]))
        way = "jointly" if modality in items.joint else "separately"
        how.append(f"{modality} {way}" + (", affixes" if has_affixes else ""))
    cells = [
        family.name,
        f"`{items.family}`",
        ", ".join(items.spec().modalities),
        f"{sum(equal.values())} of {len(equal)}",
        "; ".join(how),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"write {DOCS.relative_to(ROOT)}")
    write = parser.parse_args().write
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    text = document()
    if write:
        DOCS.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
