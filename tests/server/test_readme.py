"""The examples in README.md and docs/api.md, run against a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.support.cluster import Server
from tests.support.paths import ROOT

SHOWN = "http://127.0.0.1:8000"
PAGES = ("README.md", "docs/api.md", "docs/operations.md")
TEXT = "\n".join((ROOT / page).read_text() for page in PAGES)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def blocks(language: str, holds: str = "") -> list[str]:
    found = [text for kind, text in BLOCKS if kind == language and holds in text]
    assert found, f"the docs have no {language} with {holds!r}"
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", blocks("json"))
def test_json_blocks_are_valid(block: str) -> None:
    json.loads(block)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml_blocks_are_valid(block: str) -> None:
    yaml.safe_load(block)


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("holds", "answer"), [("input_audio", "audio 1: rising tone"), ("image_embeds", "image 1: red circle")]
)
def test_python_blocks_print_their_answer(server: Server, holds: str, answer: str) -> None:
    (block,) = blocks("python", holds)
    assert SHOWN in block
    assert run([sys.executable, "-c", block.replace(SHOWN, server.url)]).strip() == answer


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_the_ask_example_prints_its_answer(server: Server) -> None:
    (block,) = blocks("console")
    command, answer = block.removeprefix("$ ").splitlines()
    assert run(["bash", "-c", f"{sys.executable} {command} --url {server.url}"]).strip() == answer


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_curl_example_gets_its_answer(server: Server) -> None:
    (block,) = blocks("sh", "curl")
    assert SHOWN in block
    answer = json.loads(run(["bash", "-c", block.replace(SHOWN, server.url)]))
    assert answer["choices"][0]["message"]["content"] == "image 1: red circle"
