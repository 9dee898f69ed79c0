"""The running server that the tests marked `cluster` share, and a browser to look at it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.browser import DRIVER, Browser
from tests.support.cluster import Server

# pytest's own time limit holds; how long one example takes says more about the machine.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of torch, as in the stages: with several, the last bit depends on how much is computed at once."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server.start(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Browser]:
    if DRIVER is None:
        pytest.skip("chromedriver is missing: install Debian's packages chromium and chromium-driver")
    with Browser.start() as running:
        yield running
