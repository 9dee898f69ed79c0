"""The wheel: built from a copy of the sources, unpacked, and imported outside the project's folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the content of the wheel. The copy keeps the build's leftovers out of the project."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("app", "deployments", "scripts", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("package", ["app", "deployments"])
def test_the_wheel_has_every_file_of_the_package(unpacked: Path, package: str) -> None:
    assert files(unpacked / package) == files(ROOT / package)


def test_the_wheel_has_neither_tests_nor_scripts(unpacked: Path) -> None:
    (metadata,) = unpacked.glob("*.dist-info")
    assert {path.name for path in unpacked.iterdir()} == {"app", "deployments", metadata.name}


def test_the_graph_is_imported_from_the_unpacked_wheel(unpacked: Path, tmp_path: Path) -> None:
    code = "import app.graph, deployments.types; print(app.graph.__file__, deployments.types.__file__)"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(path).is_relative_to(unpacked) for path in done.stdout.split())
