"""Starts the product as a user does, `serve run` on its own YAML, and looks inside from outside."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from app.launcher import RAY_SETTINGS, SERVE_PORTS, bindable, restore_sigint
from tests.support.paths import ROOT

MEDIA_HOST = "127.31.0.1"  # Linux answers to all of 127.0.0.0/8
START_S = 120
SETTLE_S = 10
IDLE_S = 2  # of a client in the middle of its head or body


@dataclass
class Server:
    url: str
    logs: Path
    mark: str

    @classmethod
    @contextmanager
    def start(
        cls,
        folder: Path,
        change: Callable[[dict[str, Any]], object] = lambda config: None,
        env: Mapping[str, str] | None = None,
    ) -> Iterator[Server]:
        """On `serve_config.yaml` with ports of its own and whatever else `change` does to it.

        `env`: variables beside this process's own.
        """
        port, *others = free_ports(1 + len(SERVE_PORTS))
        # A port's number and the hundred after it, for the replicas of the ingress.
        own = dict(zip(SERVE_PORTS, map(str, others), strict=True))
        own["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"] = str(others[-1] + 100)
        config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        application = config["applications"][0]
        config["http_options"]["port"] = port
        for runtime_env in (config["controller_options"]["runtime_env"], application["runtime_env"]):
            variables = runtime_env["env_vars"]
            variables |= own
            proxy = variables["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"]
            variables["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] = proxy.replace(
                "http-request 20s", f"http-request {IDLE_S}s"
            )
        application["args"] |= {
            # One address of loopback and no other: the rest is as forbidden as it is by default.
            "media_loader": {"allowed_private_networks": [f"{MEDIA_HOST}/32"]},
            "body_idle_timeout_s": IDLE_S,
            "enable_mm_embeds": True,
            "enable_prompt_embeds": True,
        }
        change(config)
        path = folder / "serve_config.yaml"
        path.write_text(yaml.safe_dump(config))
        mark = f"HEADRACE_TEST={uuid.uuid4().hex}"
        output = (folder / "output.txt").open("w+")
        restore_sigint()
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(path)],
            cwd=ROOT,
            env={
                **RAY_SETTINGS,
                **os.environ,
                "RAY_ADDRESS": "local",
                **dict([mark.split("=")]),
                **(env or {}),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # and no session of its own: where Linux groups those, each has half of the CPUs
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: process.poll() is not None or healthy(url), START_S, lambda: tail(output))
            assert process.poll() is None, tail(output)
            yield cls(url, session_logs(mark), mark)
        finally:
            stop(process, mark)
            output.close()

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"} | (headers or {})
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Answer(response.status, dict(response.headers), json.load(response))
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers), json.load(error))

    def render(self, *content: object) -> dict[str, Any]:
        answer = self.post("/v1/chat/completions/render", chat(*content))
        assert answer.status == 200, answer.body
        rendered: dict[str, Any] = answer.body
        return rendered

    def log_text(self, stage: str) -> str:
        files = (self.logs / "serve").glob(f"replica_headrace_{stage}_*.log")
        return "".join(file.read_text() for file in files)

    def log_lines(self, stage: str, request_id: str) -> list[str]:
        return [line for line in self.log_text(stage).splitlines() if request_id in line]

    @contextmanager
    def object_store(self) -> Iterator[Callable[[], tuple[int, int]]]:
        """A call that tells how many objects the cluster's store holds, and their bytes."""
        with self._inside("store()") as ask:

            def objects_and_bytes() -> tuple[int, int]:
                store = ask()
                return store["objects"], store["bytes"]

            yield objects_and_bytes

    def engine(self) -> AbstractContextManager[Callable[[], dict[str, int]]]:
        """A call that tells the engine's statistics."""
        return self._inside("engine()")

    @contextmanager
    def _inside(self, asks: str) -> Iterator[Callable[[], dict[str, int]]]:
        """`asks`: an expression, evaluated in a process that is part of the cluster."""
        command = [sys.executable, "-c", _INSIDE.replace("ASKS", asks), argument(self.mark, "--gcs-address=")]
        env = {**os.environ, "RAY_ADDRESS": "", "RAY_AUTH_MODE": "token"}  # as local clusters have it
        with subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None

            def ask() -> dict[str, int]:
                print(file=stdin, flush=True)
                told: dict[str, int] = json.loads(stdout.readline())
                return told

            yield ask
            stdin.close()

    def replicas(self, stage: str) -> list[int]:
        """Process ids of the stage's replicas; of this server's alone."""
        title = f"ServeReplica:headrace:{stage}"
        return [pid for pid in marked(self.mark) if title in read(f"/proc/{pid}/cmdline")]

    def own_bytes(self, stage: str) -> int:
        """Memory of the stage's replica without what it shares, such as the object store."""
        (pid,) = self.replicas(stage)
        return int(read(f"/proc/{pid}/status").partition("RssAnon:")[2].split()[0]) * 1024


_INSIDE = """
import dataclasses, json, sys, ray
from ray import serve
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="ERROR")
def store():
    stats = get_memory_info_reply(get_state_from_address(sys.argv[1])).store_stats
    return {"objects": stats.num_local_objects, "bytes": stats.object_store_bytes_used}
def engine():
    return dataclasses.asdict(serve.get_deployment_handle("Model", "headrace").stats.remote().result())
for _ in sys.stdin:
    print(json.dumps(ASKS), flush=True)
"""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: Any


def chat(*content: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(content)}], **fields}


def media(kind: str, url: str) -> dict[str, object]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def wait_until(
    condition: Callable[[], object], timeout_s: float = SETTLE_S, why: Callable[[], str] = str
) -> None:
    """Polls: what happens in another process can not be awaited."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s. {why()}"
        time.sleep(0.05)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """In a row, of those that neither the kernel gives to connections (32768 and up) nor Ray to its workers
    (below 20000): any of those may be taken in the seconds until the server binds it.
    """
    for first in random.sample(range(20_000, 29_800), 100):
        ports = list(range(first, first + count))
        if all(bindable("0.0.0.0", port) for port in ports):
            return ports
    raise AssertionError("there are no free ports for a server")


def tail(file: Any) -> str:
    file.flush()
    return str(Path(file.name).read_text()[-4000:])


def read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def stop(process: subprocess.Popen[bytes], mark: str) -> None:
    """What does not end in time fails the test, and is ended: it would be in the way of all later ones."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


def marked(mark: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and mark in read(f"{entry}/environ"):
            yield int(entry.name)


def session_logs(mark: str) -> Path:
    return Path(argument(mark, "--session-dir=", "--session_dir=")) / "logs"


def argument(mark: str, *names: str) -> str:
    """Ray's processes name their session's folder and address in their command lines."""
    for pid in marked(mark):
        for word in read(f"/proc/{pid}/cmdline").split("\0"):
            if word.startswith(names):
                return word.partition("=")[2]
    raise AssertionError(f"the server has no process with {names}")


class MediaServer:
    """Serves bytes on loopback; a path can be held until all of a group have been asked for."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.handlers: dict[str, Callable[[web.Request], Any]] = {}
        self.asked: list[str] = []
        self.left: list[str] = []  # paths whose client went before the answer
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        try:
            if handler := self.handlers.get(request.path):
                response: web.StreamResponse | None = await handler(request)
                if response:
                    return response
        except asyncio.CancelledError:
            self.left.append(request.path)
            raise
        if request.path not in self.content:
            raise web.HTTPNotFound
        return web.Response(body=self.content[request.path])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MediaServer]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, MEDIA_HOST, 0)
        await site.start()
        self.url = f"http://{MEDIA_HOST}:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@contextmanager
def media_server() -> Iterator[MediaServer]:
    """The server on a loop of its own, for tests that block."""
    server, ready, stop = MediaServer(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with server.running():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
