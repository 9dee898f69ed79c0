"""Rows of the media corpus, which is not part of the project."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.paths import CORPUS


def embedding_files() -> list[Any]:
    """Returns a test's parameters: the rows about embeddings, or one that is skipped without the corpus."""
    try:
        lines = (CORPUS / "MANIFEST.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return [pytest.param({}, marks=pytest.mark.skip("the corpus of embeddings is missing"))]
    rows = [json.loads(line) for line in lines]
    return [pytest.param(row, id=row["file"]) for row in rows if row["file"].startswith("embeds/")]
