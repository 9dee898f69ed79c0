"""Repeated items with two replicas of each media stage: routing, and the number of times work is done."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from tests.support.cluster import ServeConfig, Server, media_server, wait_until
from tests.support.requests import RENDER, chat, media

AT_ONCE = 32
IMAGES = 20
HELD_S = 60

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    def change(config: ServeConfig) -> None:
        application = config["applications"][0]
        application["args"]["enable_reset_mm_cache"] = True
        application["args"]["media_loader"]["image_fetch_timeout_s"] = 2 * HELD_S
        for deployment in application["deployments"]:
            if deployment["name"] in ("MediaLoader", "MMPreprocessor"):
                deployment |= {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.2}}

    with Server.start(tmp_path_factory.mktemp("pair"), change) as running:
        yield running


def picture(size: int = 64) -> dict[str, object]:
    """Returns a new image. All of them have about the same number of bytes, but not the same bytes."""
    file = io.BytesIO()
    Image.effect_noise((size, size), 80).convert("RGB").save(file, "png")
    return media("image", f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")


def processed(server: Server, request_id: str) -> list[int]:
    """Returns the number of items that each preprocessor processed, for requests with this text in the id."""
    files = (server.logs / "serve").glob("replica_headrace_MMPreprocessor_*.log")
    lines = [file.read_text().splitlines() for file in files]
    return [sum("preprocessed" in line and request_id in line for line in each) for each in lines]


def items(server: Server, *content: object, request_id: str = "") -> list[dict[str, Any]]:
    answer = server.post(RENDER, chat(*content), {"x-request-id": request_id} if request_id else {})
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.body["items"]
    return found


def test_a_url_in_many_requests_at_once_is_fetched_once_and_processed_once(pair: Server) -> None:
    file = io.BytesIO()
    Image.effect_noise((800, 600), 80).save(file, "jpeg")

    with media_server() as host, ThreadPoolExecutor(AT_ONCE) as pool:

        def all_wait() -> bool:
            with urllib.request.urlopen(f"{pair.url}/stages", timeout=10) as response:
                stages = {stage["name"]: stage for stage in json.load(response)["stages"]}
            return bool(
                stages["MediaLoader.fetch"]["in_flight"] + stages["MediaLoader.decode"]["queued"] == AT_ONCE
            )

        async def held(_: web.Request) -> web.Response:
            await asyncio.to_thread(wait_until, all_wait, HELD_S)
            # Later requests may still be on their way to the replica.
            return web.Response(body=file.getvalue(), headers={"Cache-Control": "max-age=60"})

        host.handlers["/photo.jpg"] = held

        def ask(number: int) -> str:
            (item,) = items(pair, media("image", f"{host.url}/photo.jpg"), request_id=f"many-{number}-")
            return str(item["digest"])

        digests = set(pool.map(ask, range(AT_ONCE)))
        assert len(host.asked) == 1
    assert len(digests) == 1
    assert sum(processed(pair, "many-")) == 1


def test_equal_items_go_to_the_replica_that_cached_them(pair: Server) -> None:
    parts = [picture() for _ in range(IMAGES)]
    assert not any(item["cached"] for item in items(pair, *parts, request_id="all-of-them"))
    assert all(processed(pair, "all-of-them"))  # one request keeps all replicas at work
    for part in parts:
        (item,) = items(pair, part, "what is it?")
        assert item["cached"]


def test_a_reset_empties_the_caches_of_all_replicas(pair: Server) -> None:
    parts = [picture() | {"uuid": f"mine-{number}"} for number in range(6)]
    items(pair, *parts)
    assert all(item["cached"] for item in items(pair, *parts))
    assert pair.post("/reset_mm_cache", b"").status == 200
    assert not any(item["cached"] for item in items(pair, *[part | {"uuid": None} for part in parts]))
    by_name = pair.post(RENDER, chat({"type": "image_url", "image_url": None, "uuid": "mine-0"}))
    assert (by_name.status, by_name.body["error"]["code"]) == (422, "unknown_uuid")


def test_the_reset_route_is_missing_by_default(server: Server) -> None:
    assert server.post("/reset_mm_cache", b"").status == 404
