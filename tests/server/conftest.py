"""Media hosts for the tests of running servers."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.cluster import MediaServer, Server, media_server
from tests.support.media_files import gif, png, silence
from tests.support.page_host import PageHost, hosting
from tests.support.requests import media


@pytest.fixture
def remote() -> Iterator[MediaServer]:
    with media_server() as running:
        yield running


@pytest.fixture
def host() -> Iterator[PageHost]:
    with hosting() as running:
        yield running


@pytest.fixture
def six_items(remote: MediaServer) -> list[dict[str, object]]:
    """Two items of each modality on the media host, all different, interleaved."""
    remote.content = {
        "/0.png": png(10),
        "/1.wav": silence(0.5),
        "/2.gif": gif(4),
        "/3.wav": silence(1.0),
        "/4.png": png(200, (96, 48)),
        "/5.gif": gif(9),
    }
    kinds = {"png": "image", "wav": "audio", "gif": "video"}
    return [media(kinds[path[-3:]], remote.url + path) for path in remote.content]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client
