"""Metrics of running servers: the cause of starvation under three loads, and every panel of the dashboard."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from PIL import Image

from tests.support.cluster import (
    ServeConfig,
    Server,
    free_ports,
    healthy,
    media_server,
    read,
    wait_until,
)
from tests.support.embeddings import audio_embeds, tensor2base64
from tests.support.media_files import encoded, png
from tests.support.paths import ROOT, SAMPLES
from tests.support.raw_http import connect, send
from tests.support.requests import COMPLETIONS, RENDER, chat, media
from tests.support.tiny_models import qwen_vl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

DASHBOARD = ROOT / "docs" / "grafana" / "headrace.json"
PROMETHEUS = shutil.which("prometheus")
LONG = {"ignore_eos": True, "max_tokens": 400}
SCRAPE_S = 1
SLOW_S = 30  # longer than the engine needs to report that it is full


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that generates two answers at once, with logs in JSON."""

    def change(config: ServeConfig) -> None:
        config["applications"][0]["logging_config"] = {"encoding": "JSON"}
        args = config["applications"][0]["args"]
        args["engine"] = {"max_num_seqs": 2}
        args["media_loader"] |= {"image_fetch_timeout_s": 2 * SLOW_S}

    # Ray's shortest interval, so that the panels soon have data.
    env = {"RAY_metrics_report_interval_ms": "1000"}
    with Server.start(tmp_path_factory.mktemp("metrics"), change, env) as running:
        yield running


def stages(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/stages", timeout=10) as response:
        body: dict[str, Any] = json.load(response)
    return body | {"by_name": {stage["name"]: stage for stage in body["stages"]}}


@contextmanager
def clients(count: int, ask: Callable[[], object]) -> Iterator[None]:
    """Keeps `count` clients sending requests."""
    done = threading.Event()

    def client() -> None:
        while not done.is_set():
            ask()

    threads = [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def noise() -> dict[str, object]:
    """A small image that no server has seen before."""
    picture = Image.frombytes("RGB", (32, 32), random.randbytes(32 * 32 * 3))
    return media("image", f"data:image/png;base64,{base64.b64encode(encoded(picture, 'png')).decode()}")


def test_a_slow_host_starves_the_engine_and_a_full_engine_is_not_starved(own: Server) -> None:
    with media_server() as host:
        released = threading.Event()

        async def slow(_: web.Request) -> web.Response:
            await asyncio.to_thread(released.wait)
            return web.Response(body=png())

        paths = [f"/{number}.png" for number in range(4)]
        host.handlers = dict.fromkeys(paths, slow)
        waiting = [
            threading.Thread(target=own.post, args=(COMPLETIONS, chat(media("image", host.url + path))))
            for path in paths
        ]
        for thread in waiting:
            thread.start()
        try:
            wait_until(lambda: stages(own)["starved_by"] == "MediaLoader.fetch", why=lambda: str(stages(own)))
            assert set(stages(own)["starvation_s"]) == {"MediaLoader.fetch"}
            with clients(6, lambda: own.post(COMPLETIONS, chat({"type": "text", "text": "go on"}, **LONG))):
                wait_until(lambda: stages(own)["starvation_s"] == {}, SLOW_S, lambda: str(stages(own)))
                now = stages(own)["by_name"]
                assert now["MediaLoader.fetch"]["in_flight"] == 4  # requests still wait in an earlier stage
                assert now["Model"]["in_flight"] == 2
        finally:
            released.set()
            for thread in waiting:
                thread.join()


def test_a_log_line_has_request_stage_and_item(own: Server) -> None:
    pictures = [noise(), media("image", "data:image/png;base64,AAAA")]
    assert own.post(COMPLETIONS, chat(*pictures), {"x-request-id": "logged-as-json"}).status == 415
    lines = [json.loads(line) for line in own.log_lines("MMPreprocessor", "logged-as-json")]
    of_item = [line for line in lines if line.get("item") == "messages[0].content[1]"]
    refused = next(line for line in of_item if line["message"].startswith("refused with 415: "))
    assert (refused["request_id"], refused["deployment"]) == ("logged-as-json", "headrace_MMPreprocessor")
    assert [line for line in lines if line["message"] == refused["message"]] == [refused]  # once
    for file in (own.logs / "serve").glob("*.log"):
        assert str(pictures[0])[80:120] not in file.read_text()


def test_heavy_images_and_one_replica_that_prepares_them(tmp_path: Path) -> None:
    """Each request asks for another size of a small file of twelve million pixels. The model sees few."""
    most = 2**14

    def change(config: ServeConfig) -> None:
        config["applications"][0]["args"]["model"] = qwen_vl(max_pixels=most)

    picture = base64.b64encode(encoded(Image.new("RGB", (4000, 3000)), "png")).decode()
    part, numbers = media("image", f"data:image/png;base64,{picture}"), itertools.count()

    def ask() -> None:
        settings = {"max_pixels": most - next(numbers)}
        assert server.post(COMPLETIONS, chat(part, mm_processor_kwargs=settings, max_tokens=1)).status == 200

    with Server.start(tmp_path, change) as server, clients(12, ask):
        wait_until(lambda: sum(stages(server)["starvation_s"].values()) > 5, 30)
        state = stages(server)
    assert state["starved_by"] == "MMPreprocessor", state
    assert state["starvation_s"]["MMPreprocessor"] > 0.7 * sum(state["starvation_s"].values())


@pytest.fixture
def prometheus(own: Server, tmp_path: Path) -> Iterator[str]:
    """Address of a Prometheus that scrapes the server."""
    if PROMETHEUS is None:
        pytest.skip("no prometheus: install Debian's package of this name")
    (port,) = free_ports(1)
    found = json.loads((own.logs.parent / "prom_metrics_service_discovery.json").read_text())
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s"},
        "scrape_configs": [{"job_name": "ray", "static_configs": found}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    url = f"http://127.0.0.1:{port}"
    command = [PROMETHEUS, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=output
        )
        try:
            wait_until(lambda: _ready(url), why=(tmp_path / "output.txt").read_text)
            yield url
        finally:
            process.terminate()
            process.wait(20)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def has_data(prometheus: str, query: str) -> bool:
    query = query.replace("$__rate_interval", "1m")
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as response:
        return bool(json.load(response)["data"]["result"])


def test_every_query_of_every_panel_has_data(own: Server, prometheus: str) -> None:
    with media_server() as host:
        host.content["/a.png"] = png()
        embeds = [audio_embeds(8), {"type": "prompt_embeds", "data": tensor2base64(torch.zeros(4, 128))}]
        parts = [media("image", f"{host.url}/a.png"), noise(), *map(sample, ("sound.wav", "clip.mp4"))]
        mixed = chat(*parts, *embeds, {"type": "text", "text": "what?"}, max_tokens=8)
        for path in (COMPLETIONS, RENDER):
            assert own.post(path, mixed).status == 200
        own.post(COMPLETIONS, chat(media("audio", "data:audio/wav;base64,AAAA")))
        leave(own)
        die(own)

        queries = [
            (panel["title"], target["expr"])
            for panel in json.loads(DASHBOARD.read_text())["panels"]
            for target in panel.get("targets", [])
        ]
        missing = list(queries)

        def all_have_data() -> bool:
            own.post(COMPLETIONS, mixed)
            missing[:] = [each for each in missing if not has_data(prometheus, each[1])]
            return not missing

        wait_until(all_have_data, 60, lambda: "\n".join(map(str, missing)))
    assert len(queries) > 50


def sample(name: str) -> dict[str, object]:
    kind = {"wav": "audio", "mp4": "video"}[name.rpartition(".")[2]]
    data = base64.b64encode((SAMPLES / name).read_bytes()).decode()
    return media(kind, f"data:{kind}/{name.rpartition('.')[2]};base64,{data}")


def leave(server: Server) -> None:
    """Leaves in the middle of an answer."""
    with connect(server) as client:
        send(client, chat({"type": "text", "text": "go on"}, stream=True, **LONG))
        client.recv(1)


def die(server: Server) -> None:
    """Kills the preprocessor until a call was in flight in it and is retried."""
    for _ in range(3):
        (pid,) = server.replicas("MMPreprocessor")
        with clients(8, lambda: server.post(COMPLETIONS, chat(noise(), max_tokens=1))):
            wait_until(lambda: stages(server)["by_name"]["MMPreprocessor"]["rate_per_s"] > 0)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: set(server.replicas("MMPreprocessor")) - {pid}, 30)  # noqa: B023
            wait_until(lambda: healthy(server.url), 30)
        if any("Trying once more" in read(str(log)) for log in server.logs.rglob("*Ingress*")):
            return
