"""The running server that the tests marked `cluster` share, and helpers to look inside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server.start(tmp_path_factory.mktemp("server")) as running:
        yield running
