"""The exactness table: each family of tests/support/tiny_families.py, items apart against one call.

scripts/families.py            prints docs/families.md
scripts/families.py --write    writes it; tests/deployments/processor/test_families.py keeps it true
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

Written by `scripts/families.py`; a test keeps it true.

The model gets bit for bit what its Hugging Face processor gives for the whole conversation, though items are
processed apart, in parallel. For each family below a tiny processor of its kind is built
(`tests/support/tiny_families.py`), and a conversation of six messages with three items of each modality, of
different sizes, goes both ways: item by item, and through one call of
`processor.apply_chat_template(..., tokenize=True, return_dict=True)`. "Equal" counts the tensors, token ids
among them, that are the same in every bit.

"""

TAIL = """
* **Apart**: each item in a call of its own, on any replica.
* **Together**: when a request has several items of this modality they go through one call, because what the
  processor makes of one depends on the others. LLaVA-OneVision cuts an image into tiles only if it is alone.
  Gemma 3n and Phi-4-multimodal pad sounds to the longest before they take the spectrum, which changes the
  ends of the shorter ones, and Phi-4-multimodal makes a mask only of several.
* **Texts**: the processor puts plain text around such an item (line breaks, times, "Frame1: "), which grows
  together with what stands beside it; the prompt is encoded once more when the items are there.

## Other families

The code names families only in the table of `deployments/processor/joining.py`, for features that are not
simply concatenated. When `MMPreprocessor` starts, it tries a few small items of each modality both ways
(`deployments/processor/exactness.py`), with the checkpoint's own processor and template. A modality that does
not come out equal is left out, and the log says which, of what family, and why; a model with media of which
none come out does not start. PaliGemma, for example, is refused: its processor writes into the text around
the images.

Equal bits need `mm_preprocessor.torch_threads: 1`, the default. With more, torch may round otherwise when a
batch has another size, in the processor's own calls, too.

The model of GLM-4V in transformers 5.24 takes images or videos in one request, and fails on both together.
SmolVLM's processor needs the package `num2words`.
"""


def document() -> str:
    rows = ["| family | processor | takes | equal | how |", "|---|---|---|---|---|"]
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
        texts = any(any(each.affixes) for item in alike for each in items.process([item]))
        way = "together" if modality in items.spec().together else "apart"
        how.append(f"{modality} {way}" + (", texts" if texts else ""))
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
