"""Runs the server as a user does, with `serve run` on its own YAML, and inspects it from outside."""

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from app.launcher import RAY_SETTINGS, SERVE_PORTS, bindable, restore_sigint
from tests.support.paths import ROOT
from tests.support.requests import COMPLETIONS, RENDER, chat, events

MEDIA_HOST = "127.31.0.1"  # Linux answers to all of 127.0.0.0/8
START_S = 120
SETTLE_S = 10
IDLE_S = 2  # that a client may pause within its head or body


# serve_config.yaml as parsed
ServeConfig = dict[str, Any]


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
        change: Callable[[ServeConfig], object] = lambda config: None,
        env: Mapping[str, str] | None = None,
    ) -> Iterator[Server]:
        """Runs `serve_config.yaml` on ports of its own, with further changes by `change`.

        `env`: variables in addition to those of this process.
        """
        port, *others = free_ports(1 + len(SERVE_PORTS))
        # The replicas of the ingress take the last port and the hundred after it.
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
            # Allows one address of loopback; the others stay forbidden, as by default.
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
            process_group=0,  # not a session: Linux may share CPUs between sessions, so that each gets half
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

    def ask(self, *content: object, **fields: object) -> Answer:
        """Posts a chat of one message, by default for twelve tokens and greedy."""
        return self.post(COMPLETIONS, chat(*content, **{"temperature": 0, "max_tokens": 12, **fields}))

    def assert_answers(self) -> None:
        """Checks that the server still answers."""
        assert self.ask("hello", max_tokens=1).status == 200

    def stream(self, *content: object, **fields: object) -> list[dict[str, Any]]:
        """Returns the chunks of a streamed answer to the same request as `ask` posts."""
        body = chat(*content, **{"temperature": 0, "max_tokens": 12, **fields, "stream": True})
        request = urllib.request.Request(self.url + COMPLETIONS, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            return events(response.read().decode())

    def render(self, *content: object, **fields: object) -> dict[str, Any]:
        """Returns what the server makes of a message without generating."""
        answer = self.post(RENDER, chat(*content, **fields))
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
        """Yields a call that returns the number of objects in the cluster's store, and their bytes."""
        with self._inside("store()") as ask:

            def objects_and_bytes() -> tuple[int, int]:
                store = ask()
                return store["objects"], store["bytes"]

            yield objects_and_bytes

    def engine(self) -> AbstractContextManager[Callable[[], dict[str, int]]]:
        """Yields a call that returns the engine's statistics."""
        return self._inside("engine()")

    @contextmanager
    def _inside(self, asks: str) -> Iterator[Callable[[], dict[str, int]]]:
        """Yields a call that evaluates the expression `asks` in a process of the cluster."""
        command = [sys.executable, "-c", _INSIDE.replace("ASKS", asks), argument(self.mark, "--gcs-address=")]
        env = {**os.environ, "RAY_ADDRESS": "", "RAY_AUTH_MODE": "token"}  # as in local clusters
        with subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None

            def ask() -> dict[str, int]:
                print(file=stdin, flush=True)
                values: dict[str, int] = json.loads(stdout.readline())
                return values

            yield ask
            stdin.close()

    def replicas(self, stage: str) -> list[int]:
        """Returns the process ids of the stage's replicas in this server."""
        title = f"ServeReplica:headrace:{stage}"
        return [pid for pid in marked(self.mark) if title in read(f"/proc/{pid}/cmdline")]

    def own_bytes(self, stage: str) -> int:
        """Returns the memory of the stage's only replica without shared parts such as the object store."""
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

    def refusal(self, param: str | None = None, status: tuple[int, ...] = (400, 413, 415, 422)) -> str:
        """Returns the message of an error in OpenAI's envelope, after checks of its status and param."""
        assert self.status in status, (self.status, self.body)
        error = self.body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert param is None or error["param"] == param, error
        return str(error["message"])


def wait_until(
    condition: Callable[[], object], timeout_s: float = SETTLE_S, why: Callable[[], str] = str
) -> None:
    """Polls `condition`, since an event in another process cannot be awaited."""
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
    """Returns consecutive free ports.

    The kernel gives ports from 32768 on to connections, and Ray gives those below 20000 to its workers.
    Such a port might be taken in the seconds until the server binds it.
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
    """Stops the server. If it does not end in time, kills it for the sake of later tests, and fails."""
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
    """Returns an argument from the command line of one of the server's Ray processes."""
    for pid in marked(mark):
        for word in read(f"/proc/{pid}/cmdline").split("\0"):
            if word.startswith(names):
                return word.partition("=")[2]
    raise AssertionError(f"the server has no process with {names}")


# Returns a response, or None for the bytes in `content`.
Handler = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


class MediaServer:
    """Serves bytes on loopback. A handler can hold a path, or answer in place of its bytes."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.handlers: dict[str, Handler] = {}
        self.asked: list[str] = []
        self.left: list[str] = []  # paths whose client left before the answer
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        try:
            if handler := self.handlers.get(request.path):
                response = await handler(request)
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
    """Runs the server on an event loop in a thread, for tests that block."""
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
