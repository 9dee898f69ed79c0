"""Imports run one way, and each stage's process imports only what it needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = {"media", "embeddings", "preprocess", "tokenizer", "model"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", modules("deployments"), ids=lambda p: str(p.relative_to(ROOT)))
def test_stages_never_import_the_app(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in {"app", "fastapi", "openai"}}


@pytest.mark.parametrize("path", modules("deployments/multimodal"), ids=lambda p: p.name)
def test_ray_appears_nowhere_in_multimodal(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] == "ray"}


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_stages_do_not_import_each_other(stage: str) -> None:
    others = {f"deployments.{other}" for other in STAGES - {stage}}
    assert not imports(ROOT / "deployments" / f"{stage}.py") & others


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("app.ingress", {"torch", "transformers", "PIL", "av", "soundfile"}),
        ("deployments.media", {"torch", "transformers"}),
        ("deployments.embeddings", {"transformers"}),
        ("deployments.tokenizer", {"torch"}),
        ("app.graph", {"torch", "transformers"}),
    ],
)
def test_a_process_imports_only_what_it_needs(module: str, banned: set[str]) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not banned & set(out.stdout.split())
