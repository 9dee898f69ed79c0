"""Starts `serve run` with checks before, a word when it is ready, and a clean end. For scripts/serve.

    scripts/serve [config.yaml] [--verbose]

Prints what a person wants to know; `--verbose` shows every log line of every stage. The logs are in Ray's
session folder either way.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

# Ports of Ray Serve itself. Some of them two servers would share without a word, and mix up their requests.
SERVE_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": 30000,
}
RAY_SETTINGS = {
    # Ray starts workers at niceness 15; at 0, only the pools of heavy work stand back.
    "RAY_worker_niceness": "0",
    # Every call between stages is a task: books of each, for `ray list tasks` and Ray's own statistics, take
    # time in every process.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
}
RELEASE_S = 65.0
LOGS = Path(tempfile.gettempdir(), "ray/session_latest/logs/serve")

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# As text, or as JSON.
_LEVEL = re.compile(r"""[ "](DEBUG|INFO|WARNING|ERROR|CRITICAL)[ "]""")
_BAD = ("WARNING", "ERROR", "CRITICAL")
_TRACE = re.compile(r"Traceback|Error:")
# Ray's warning of every address but 0.0.0.0, for clusters of several nodes. Loopback is meant, see README.md.
_EXPECTED = re.compile(r"HTTPOptions\.host='127\.0\.0\.1' won't accept connections")
_DEPLOY_FAILED = re.compile(r"Deploying app '\S+' failed|Failed to update the deployments|DEPLOY_FAILED")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/serve", description="Starts Headrace.")
    parser.add_argument("config", nargs="?", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--verbose", action="store_true", help="show every log line of every stage")
    args = parser.parse_args()
    try:
        config = yaml.safe_load(args.config.read_text())
        config["applications"][0]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, LookupError) as error:
        told = str(error) if isinstance(error, (OSError, yaml.YAMLError)) else "it is no config of Ray Serve"
        print(f"Headrace cannot start: {args.config}: {told}", file=sys.stderr)
        return 1
    problem = wrong_settings(config)
    http = {"host": "127.0.0.1", "port": 8000} | ((not problem and config.get("http_options")) or {})
    if problem := problem or busy_port(http["host"], http["port"], serve_ports(config)):
        print(f"Headrace cannot start: {problem}", file=sys.stderr)
        return 1
    url = f"http://{http['host']}:{http['port']}"
    print(f"Starting Headrace from {args.config}; its logs go to {LOGS}", flush=True)
    hear_interrupts()
    server = subprocess.Popen(
        [sys.executable, "-m", "ray.serve.scripts", "run", str(args.config)],
        env={**RAY_SETTINGS, **os.environ, **({"HEADRACE_VERBOSE": "1"} if args.verbose else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,  # a terminal's Ctrl-C comes to us alone, and to `serve run` once, through `stop`
    )
    stopping = threading.Event()

    def stop(*_: object) -> None:
        if not stopping.is_set() and server.poll() is None:
            stopping.set()
            print("Stopping Headrace ...", flush=True)
            server.send_signal(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    threading.Thread(target=announce, args=(server, url, stop), daemon=True).start()
    assert server.stdout is not None
    # Once it stops, the stages' complaints about each other's absence are of no use to anybody.
    relay((line for line in server.stdout if args.verbose or not stopping.is_set()), args.verbose, stop)
    return server.wait()


def hear_interrupts() -> None:
    """For `serve run`, which shuts down cleanly, HAProxy included, on SIGINT alone.

    Who was started in the background by a shell without job control ignores it, and so would whom they start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def serve_ports(config: dict[str, Any]) -> dict[str, int]:
    env = config.get("controller_options") or {}
    for key in ("runtime_env", "env_vars"):
        env = env.get(key) or {}
    return {name: int(env.get(name, port)) for name, port in SERVE_PORTS.items()}


def busy_port(host: str, port: int, serve: dict[str, int]) -> str | None:
    """One line that says what is in the way."""
    if not bindable(host, port):
        return f"port {port} is taken. Is it running already? Stop it, or change http_options.port."
    # For a minute after a server stopped, connections that ended (TIME_WAIT) hold the last of its ports.
    patience = time.monotonic() + RELEASE_S
    for name, number in serve.items():
        if not bindable("0.0.0.0", number) and RELEASE_S:
            print(f"Port {number} is still taken, as by the last server's connections for a minute;", end="")
            print(f" waiting up to {RELEASE_S:.0f} s for it ...", flush=True)
        while not bindable("0.0.0.0", number):
            if time.monotonic() < patience:
                time.sleep(0.1)
                continue
            return (
                f"port {number} is taken, by another Ray Serve or an HAProxy that a killed server left behind"
                f" (`pgrep -a haproxy`). End it, or set {name} in the config's env_vars."
            )
    return None


def bindable(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def wrong_settings(config: dict[str, Any]) -> str | None:
    """What Serve or the application would refuse, or ignore, told before anything is started."""
    from ray.serve.schema import ServeDeploySchema

    from app.config import AppConfig
    from app.openai.validation import describe, param_path

    wrong: list[str] = []
    try:
        ServeDeploySchema.model_validate(config)
        wrong += unknown_keys(config)
    except ValidationError as error:
        wrong += [f"{param_path(each['loc'])}: {each['msg']}" for each in error.errors()]
    except (TypeError, ValueError) as error:
        wrong.append(str(error))
    try:
        AppConfig.model_validate(config["applications"][0].get("args") or {})
    except ValidationError as error:
        for each in error.errors():
            path = param_path(each["loc"])
            wrong.append(f"args.{path} {describe(each)}" if path else f"args: {describe(each)}")
    return "; ".join(wrong) or None


def unknown_keys(config: dict[str, Any]) -> Iterator[str]:
    """Of a config that Serve takes: it drops them without a word."""
    from ray.serve.schema import (
        DeploymentSchema,
        HTTPOptionsSchema,
        ServeApplicationSchema,
        ServeDeploySchema,
    )

    from app import graph

    parts = [("", config, ServeDeploySchema)]
    parts.append(("http_options.", config.get("http_options", {}), HTTPOptionsSchema))
    for i, application in enumerate(config["applications"]):
        place = f"applications[{i}]."
        parts.append((place, application, ServeApplicationSchema))
        for j, deployment in enumerate(application.get("deployments") or []):
            parts.append((f"{place}deployments[{j}].", deployment, DeploymentSchema))
            if (
                application["import_path"] == "app.graph:build"
                and deployment["name"] not in graph.DEPLOYMENTS
            ):
                known = ", ".join(graph.DEPLOYMENTS)
                yield f"{place}deployments[{j}].name: {deployment['name']} is none of {known}"
    for place, part, schema in parts:
        for key in part:
            if key not in schema.model_fields:
                yield f"{place}{key} is not known here; settings of Headrace are under `args`"


def announce(server: subprocess.Popen[str], url: str, give_up: Callable[[], object]) -> None:
    from app.http.auth import ENVIRONMENT

    start = time.monotonic()
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                break
        except OSError:
            time.sleep(0.2)
    else:
        return
    if ENVIRONMENT in os.environ and open_to_all(url):
        print(
            f"Headrace cannot start: {ENVIRONMENT} did not reach the Ray cluster, which ran before.",
            file=sys.stderr,
        )
        give_up()
    else:
        seconds = time.monotonic() - start
        print(f"Headrace is ready at {url} after {seconds:.0f} s. Ctrl-C stops it.", flush=True)


def open_to_all(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        with error:
            return error.code != 401


def is_worth_showing(line: str) -> bool:
    level = _LEVEL.search(line)  # the first one: what follows may speak of others
    bad = level.group(1) in _BAD if level else _TRACE.search(line)
    return bool(bad) and not _EXPECTED.search(line)


def relay(lines: Iterable[str], verbose: bool, give_up: Callable[[], object]) -> None:
    """Passes on what a person should see, until the server ends."""
    showing = False
    for line in lines:
        plain = _COLOUR.sub("", line)
        # A log line decides for the lines that follow it, such as those of a traceback.
        if _LEVEL.search(plain):
            showing = is_worth_showing(plain)
        if verbose or showing or is_worth_showing(plain):
            print(line if sys.stdout.isatty() else plain, end="", flush=True)
        if _DEPLOY_FAILED.search(plain):
            print("Headrace cannot start: see above for the reason.", file=sys.stderr, flush=True)
            give_up()


if __name__ == "__main__":
    sys.exit(main())
