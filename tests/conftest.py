"""Fixtures of all tests: the running server that tests marked `cluster` share, and a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.browser import DRIVER, Browser
from tests.support.cluster import Server

# pytest limits the time of a test. The time of one example depends mostly on the machine.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, as in the stages. With several, the last bit depends on the batch size."""
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
