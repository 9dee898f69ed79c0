"""Folders of the project, its samples and, if present, the media corpus."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "docs" / "samples"
CORPUS = ROOT.parent / "shared" / "corpus"
