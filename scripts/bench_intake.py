"""Measures small requests while large embeddings arrive, and the cost of such an embedding.

    python -m scripts.bench_intake [--seconds 10] [--variant headrace|plain]

Starts the server of serve_config.yaml twice: as it is, and the plain way, in which `json.loads` parses the
joined body and `torch.load` loads the embedding in a thread of the ingress. Both get the same requests. The
embeddings are base64 of torch.save, of 8, 32 and 128 MiB, sent one after the other as fast as the server
reads them, and then four of 128 MiB at once. At the same time one client repeats a short text and one reads
/health. The embeddings have more tokens than the context: each is answered with a 400 after it was loaded.

`gap` is the delay with which an event loop of the ingress wakes from a sleep of 2 ms; of the application's
loop and uvicorn's, the longer delay is printed. The probe is in this script. Linux only; on a busy machine
only ratios count.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import io
import json
import math
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pybase64
import yaml
from blake3 import blake3
from fastapi import FastAPI, Request, Response
from ray.serve import Application
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

import app.graph
import app.http.body_reader
import app.ingress
from app.config import AppConfig
from app.http import gate, middleware
from app.http.settings import ApiSettings
from app.intake.scanner import Body
from app.ray_stages import Handle
from deployments.errors import PromptTooLong
from deployments.media.base64_stream import decode
from deployments.runtime.payload import unpack_pieces
from deployments.types import CallHeader, EmbeddingSource
from tests.support.cluster import ServeConfig

ROOT = Path(__file__).parent.parent
MIB = 2**20
SIZES = (8 * MIB, 32 * MIB, 128 * MIB)
AT_ONCE = 4
HIDDEN_SIZE, MERGE = 128, 2  # tiny-omni's: each embedding is 2 x 2 cells of the grid
COMPLETIONS = "/v1/chat/completions"
STAGES = ("Ingress", "EmbeddingLoader", "MediaLoader", "MMPreprocessor", "Tokenizer", "Model")
VARIANT = "HEADRACE_BENCH_VARIANT"
START_S, STOP_S = 120, 60


# In the server


def build(args: dict[str, object]) -> Application:
    """`import_path: scripts.bench_intake:build`: the graph with an ingress that is watched."""
    with patch("app.graph.Ingress", Ingress):
        return app.graph.build(AppConfig.model_validate(args))


def middlewares() -> list[Middleware]:
    return [*middleware.middlewares(), Middleware(_WatchOwnLoop)]


class Gaps:
    """Returns the longest delay of the loop since the last call, in ms."""

    def __init__(self) -> None:
        self._ms: list[float] = []
        self._task = asyncio.create_task(self._watch())

    async def _watch(self, sleep_s: float = 0.002) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(sleep_s)
            self._ms.append((time.perf_counter() - start - sleep_s) * 1000)

    def take(self) -> list[float]:
        taken, self._ms = self._ms, []
        return taken


_loops: list[Gaps] = []


class _WatchOwnLoop:
    _watching = False

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _WatchOwnLoop._watching:
            _WatchOwnLoop._watching = True
            _loops.append(Gaps())
        await self._app(scope, receive, send)


class Ingress(app.ingress.Ingress):
    async def __init__(self, settings: ApiSettings, **stages: Handle) -> None:  # type: ignore[misc]
        if os.environ[VARIANT] == "plain":
            _be_plain()
            stages["EmbeddingLoader"] = _InProcess(stages["EmbeddingLoader"])
        await super().__init__(settings, **stages)
        _loops.append(Gaps())

    def __serve_build_asgi_app__(self) -> FastAPI:
        api: FastAPI = super().__serve_build_asgi_app__()

        @api.get("/bench/gaps")
        async def gaps() -> list[list[float]]:
            return [loop.take() for loop in _loops]

        @api.get("/bench/store")
        async def store() -> int:
            return await asyncio.to_thread(_store_bytes)

        @api.post("/bench/drain")
        async def drain(http: Request) -> Response:
            async for chunk in http.stream():
                gate.taken(http.scope, len(chunk))
            return Response()

        return api


def _store_bytes() -> int:
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.object_store_bytes_used)


class _PlainBody(Body):
    def parse(self) -> dict[str, object]:
        document: dict[str, object] = json.loads(self.document)
        return document


def _be_plain() -> None:
    async def read_body(chunks: AsyncIterable[bytes], **_: object) -> Body:
        document = b"".join([chunk async for chunk in chunks])
        return _PlainBody(document, {}, len(document))

    vars(app.http.body_reader).update(read_body=read_body)


class _InProcess:
    """Stands for the handle to EmbeddingLoader."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.load = SimpleNamespace(remote=self._remote)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def options(self, **_: object) -> _InProcess:
        return self

    def _remote(self, header: CallHeader, source: EmbeddingSource) -> asyncio.Task[None]:
        return asyncio.create_task(self._load(source))

    async def _load(self, source: EmbeddingSource) -> None:
        pieces = await unpack_pieces(source.sent[source.name])
        shape = await asyncio.to_thread(self._torch_load, b"".join(piece.data for piece in pieces))
        raise PromptTooLong(f"{shape[0]} tokens are more than the model's context.")

    @staticmethod
    def _torch_load(text: bytes) -> tuple[int, ...]:
        import torch

        tensor: torch.Tensor = torch.load(io.BytesIO(pybase64.b64decode(text)), weights_only=True)
        return tuple(tensor.shape)


# Around the server


@dataclass
class Server:
    port: int
    pids: dict[str, int]

    @classmethod
    @contextmanager
    def start(cls, variant: str) -> Iterator[Server]:
        mark = uuid.uuid4().hex
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "bench.yaml")
            path.write_text(yaml.safe_dump(config := configured(variant)))
            port = int(config["http_options"]["port"])
            with Path(folder, "log.txt").open("w+") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "app.launcher", str(path)],
                    cwd=ROOT,
                    env={**os.environ, "RAY_ADDRESS": "local", "HEADRACE_BENCH": mark},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                try:
                    wait_until_ready(port, process, log.name)
                    yield cls(port, dict(stages(mark)))
                finally:
                    process.send_signal(signal.SIGINT)
                    process.wait(STOP_S)

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def cpu_ms(self) -> dict[str, float]:
        """Returns the CPU seconds of each process since its start. The client is this process."""
        user, system, *_ = os.times()
        ms = {"client": (user + system) * 1000}
        for name, pid in self.pids.items():
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            ms[name] = sum(map(int, ticks)) * 1000 / os.sysconf("SC_CLK_TCK")
        return ms

    def anonymous_mib(self, stage: str) -> float:
        status = Path(f"/proc/{self.pids[stage]}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    def send(self, path: str, body: bytes) -> Sent:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        start = time.perf_counter()
        connection.request("POST", path, body)
        sent = time.perf_counter()
        response = connection.getresponse()
        answer = response.read()
        done = time.perf_counter()
        connection.close()
        assert response.status in (200, 400), answer[:500]
        return Sent((sent - start) * 1000, (done - start) * 1000)


@dataclass(frozen=True, slots=True)
class Sent:
    sent_ms: float  # until the last byte was taken
    wall_ms: float


def configured(variant: str) -> ServeConfig:
    config: ServeConfig = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    application = config["applications"][0]
    application["import_path"] = "scripts.bench_intake:build"
    application["args"]["enable_mm_embeds"] = True
    application["runtime_env"]["env_vars"] |= {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "scripts.bench_intake:middlewares",
        VARIANT: variant,
    }
    return config


def wait_until_ready(port: int, process: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    sys.exit("The server did not start:\n" + Path(log).read_text()[-4000:])


def stages(mark: str) -> Iterator[tuple[str, int]]:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_text(errors="replace"):
                title = (entry / "cmdline").read_text().split("\0")[0]
                if title.startswith("ray::ServeReplica:headrace:"):
                    yield title.rpartition(":")[2], int(entry.name)
                elif title.endswith("/haproxy"):
                    yield "HAProxy", int(entry.name)


# Measuring


@dataclass
class Figures:
    health_ms: list[float] = field(default_factory=list)
    text_ms: list[float] = field(default_factory=list)
    gap_ms: list[list[float]] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    peak_mib: dict[str, float] = field(default_factory=dict)


def measure(server: Server, seconds: float, load: Callable[[], list[Sent]]) -> Figures:
    """Small requests and samples of memory for some seconds while `load` runs over and over."""
    figures, over = Figures(), threading.Event()

    def repeat(step: Callable[[], object], pause_s: float) -> None:
        while not over.is_set():
            step()
            over.wait(pause_s)

    def sample() -> None:
        for stage in server.pids:
            figures.peak_mib[stage] = max(figures.peak_mib.get(stage, 0), server.anonymous_mib(stage))

    health = http.client.HTTPConnection("127.0.0.1", server.port)
    text = http.client.HTTPConnection("127.0.0.1", server.port)
    server.get("/bench/gaps")
    with ThreadPoolExecutor() as pool:
        steps = [
            pool.submit(repeat, lambda: figures.health_ms.append(health_ms(health)), 0.005),
            pool.submit(repeat, lambda: figures.text_ms.append(first_token_ms(text)), 0.02),
            pool.submit(repeat, sample, 0.02),
        ]
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                figures.sent += load()
        finally:
            over.set()
        for step in steps:
            step.result()
    figures.gap_ms = server.get("/bench/gaps")
    return figures


def health_ms(connection: http.client.HTTPConnection) -> float:
    start = time.perf_counter()
    connection.request("GET", "/health")
    assert connection.getresponse().read()
    return (time.perf_counter() - start) * 1000


def first_token_ms(connection: http.client.HTTPConnection) -> float:
    message = {"role": "user", "content": f"hello {time.time_ns()}"}
    body = json.dumps({"messages": [message], "max_tokens": 8, "stream": True})
    start = time.perf_counter()
    connection.request("POST", COMPLETIONS, body)
    response = connection.getresponse()
    first = 0.0
    while line := response.readline():
        if b'"content":' in line and b'"content":""' not in line:
            first = first or time.perf_counter()
    return (first - start) * 1000


def wait(seconds: float = 0.5) -> list[Sent]:
    time.sleep(seconds)
    return []


def embedding(num_tokens: int) -> bytes:
    """torch.save of float32 [num_tokens, HIDDEN_SIZE]."""
    import torch

    file = io.BytesIO()
    torch.save(torch.rand(num_tokens, HIDDEN_SIZE), file)
    return file.getvalue()


def request(file: bytes, num_tokens: int) -> bytes:
    marker, side = "the tensor", MERGE * math.isqrt(num_tokens)
    embeds = {"image_embeds": marker, "image_grid_thw": [1, side, side]}
    part = {"type": "image_embeds", "image_embeds": embeds}
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]})
    return body.encode().replace(marker.encode(), base64.b64encode(file), 1)


def at_once(server: Server, body: bytes, count: int) -> list[Sent]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: server.send(COMPLETIONS, body), range(count)))


# What each step of one large embedding must cost


def floors(server: Server, file: bytes, body: bytes) -> dict[str, float]:
    """ms of each step alone: the least of three."""
    text = np.frombuffer(base64.b64encode(file), np.uint8)
    return {
        "receive": least(lambda: server.send("/bench/drain", body)),
        "copy": least(lambda: fresh(text.nbytes).write(text.data)),
        "base64": least(lambda: decoded(text, fresh(len(file)))),
        "load": least(lambda: blake3(file).hexdigest()),
        "copy again": least(lambda: fresh(len(file)).write(file)),
    }


def fresh(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes)


def decoded(text: Any, target: mmap.mmap) -> None:
    for part in decode([text]):
        target.write(part)


def least(step: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1000)
    return min(times)


# The report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument("--variant", choices=("headrace", "plain"), help="only this one")
    args = parser.parse_args()
    sys.setswitchinterval(0.0005)  # the threads that send must not be what the others wait for
    num_tokens = {size: size // 4 // HIDDEN_SIZE for size in SIZES}
    files = {size: embedding(count) for size, count in num_tokens.items()}
    bodies = {size: request(file, num_tokens[size]) for size, file in files.items()}
    for variant in [args.variant] if args.variant else ("headrace", "plain"):
        with Server.start(variant) as server:
            report(server, variant, args.seconds, files[SIZES[-1]], bodies)


def report(server: Server, variant: str, seconds: float, file: bytes, bodies: dict[int, bytes]) -> None:
    largest = bodies[SIZES[-1]]
    memory = {stage: server.anonymous_mib(stage) for stage in server.pids}
    store = server.get("/bench/store")
    head = "gap p99.9    max  health p99    max   text p50    p99 ms    embeddings"
    print(f"\n{variant:<18} {head}", flush=True)
    measure(server, 2, wait)  # warm
    idle = row("idle", measure(server, seconds, wait))
    rows = [
        row(f"{size // MIB} MiB", measure(server, seconds, lambda: [server.send(COMPLETIONS, body)]))  # noqa: B023
        for size, body in bodies.items()
    ]
    rows.append(
        row(f"{AT_ONCE} x 128 MiB", measure(server, seconds, lambda: at_once(server, largest, AT_ONCE)))
    )
    print_wall(server, file, largest)
    peaks = {stage: max(figures.peak_mib[stage] for figures in [idle, *rows]) for stage in server.pids}
    time.sleep(3)  # a collection comes after the last body
    print(f"object store: {store / MIB:.0f} MiB before, {server.get('/bench/store') / MIB:.0f} after")
    for stage in STAGES:
        before, peak, after = memory[stage], peaks[stage], server.anonymous_mib(stage)
        print(f"{stage:<16} {before:5.0f} MiB of its own before, {peak:5.0f} at most, {after:5.0f} after")


def row(name: str, figures: Figures) -> Figures:
    worst = max(figures.gap_ms, key=lambda loop: quantile(loop, 0.999))
    print(
        f"{name:<18} {quantile(worst, 0.999):9.1f} {max(map(max, figures.gap_ms)):6.1f}"
        f" {quantile(figures.health_ms, 0.99):11.1f} {max(figures.health_ms):6.1f}"
        f" {quantile(figures.text_ms, 0.5):10.1f} {quantile(figures.text_ms, 0.99):6.1f}"
        f" {len(figures.sent):17}",
        flush=True,
    )
    return figures


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))]


def print_wall(server: Server, file: bytes, body: bytes) -> None:
    """Without other requests."""
    steps = floors(server, file, body)
    before, own = busy_s(), server.cpu_ms()
    one = [server.send(COMPLETIONS, body) for _ in range(5)]
    busy = (busy_s() - before) / len(one)
    by_process = {name: (ms - own[name]) / len(one) for name, ms in server.cpu_ms().items()}
    sent, wall = (statistics.median(getattr(s, f"{name}_ms") for s in one) for name in ("sent", "wall"))
    four = statistics.median(max(s.wall_ms for s in at_once(server, body, AT_ONCE)) for _ in range(3))
    must = sum(steps.values())
    each = ", ".join(f"{name} {ms:.0f}" for name, ms in steps.items())
    print(f"one of 128 MiB alone: {wall:.0f} ms, of which {sent:.0f} until it was sent")
    print(f"its steps, each alone: {must:.0f} ms ({each}); it takes {wall / must:.2f} of their sum")
    print(f"{AT_ONCE} at once: {four:.0f} ms, {four / wall:.2f} of one")
    cores = os.cpu_count() or 1
    least_ms = AT_ONCE * busy * 1000 / cores
    shares = ", ".join(f"{name} {ms:.0f}" for name, ms in sorted(by_process.items(), key=lambda x: -x[1]))
    print(f"one takes {busy:.2f} s of CPU; {AT_ONCE} at least {least_ms:.0f} ms")
    print(f"ms of it by process, the rest is the system's and Ray's own: {shares}")


def busy_s() -> float:
    """CPU seconds of the whole machine."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + sum(rest[:2])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
