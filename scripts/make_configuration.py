"""Makes docs/configuration.md from the fields of the settings.

python -m scripts.make_configuration            prints the page
python -m scripts.make_configuration --write    writes it; a test checks that it is up to date
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mdformat
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.config import SET_AT_TOP, AppConfig

DOCS = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """\
# Configuration

`python -m scripts.make_configuration --write` makes this page from the code, and a test keeps it up to date.

`serve_config.yaml` has two kinds of settings:

- Ray Serve's own: the address (`http_options`), and under `deployments` the replicas, CPUs, GPUs and queue
  length of each deployment. Ray's documentation describes them.
- Headrace's: everything under `args`. This page lists them.

`scripts/serve other.yaml` uses another file. A key that neither Serve nor Headrace knows is refused by name,
before anything starts. Changes take effect at the next start.

## Replicas, CPUs and GPUs

Each row of `deployments` sets one deployment: `Ingress`, `Tokenizer`, `MediaLoader`, `EmbeddingLoader`,
`MMPreprocessor`, `Model`.

- `num_replicas`: the number of processes. For more images a second, add replicas of `MMPreprocessor`.
- `max_ongoing_requests`: calls that one replica takes at once.
- `ray_actor_options.num_cpus`: CPUs that Ray reserves for a replica. It is not a limit.
- `ray_actor_options.num_gpus`: set it to 1 for `Model` on a machine with a GPU.

## Settings under `args`

A dot means nesting: `media_loader.threads` is written `media_loader: {threads: 2}`. Each stage has a section
of its own name. The section of `Model` is `engine`, because `model` names the checkpoint.

| setting | default | description |
|---|---|---|
"""


class Setting(NamedTuple):
    name: str
    default: str
    description: str


def settings() -> list[Setting]:
    return list(_settings(AppConfig, ""))


def document() -> str:
    rows = (f"| `{name}` | `{default}` | {description} |" for name, default, description in settings())
    options = {"wrap": "keep", "number": True, "plugin": {"tables": {"compact_tables": True}}}
    return mdformat.text(HEAD + "\n".join(rows) + "\n", options=options, extensions={"tables"})


def _settings(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        if prefix and name in SET_AT_TOP:
            continue
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from _settings(nested, f"{prefix}{name}.")
        else:
            yield Setting(f"{prefix}{name}", _default(field), field.description or "")


def _default(field: FieldInfo) -> str:
    return json.dumps(field.get_default(call_default_factory=True)).replace('"', "") or '""'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/configuration.md")
    if parser.parse_args().write:
        DOCS.write_text(document(), encoding="utf-8")
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
