"""Checks the configuration, runs `serve run`, reports when the server is ready, and stops it cleanly.

    scripts/serve [config.yaml] [--verbose]

Prints warnings, errors and the server's state; `--verbose` prints every log line of every stage. All logs are
in Ray's session folder too.
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

# Ports of Ray Serve itself. Two servers could share some of them silently, and would mix up their requests.
SERVE_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": 30000,
}
RAY_SETTINGS = {
    # Ray starts workers at niceness 15. At 0, only the pools for heavy work have a lower priority.
    "RAY_worker_niceness": "0",
    # Every call between stages is a task. Recording each of them, for `ray list tasks` and for Ray's own
    # statistics, takes time in every process.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
}
RELEASE_S = 65.0  # the OS keeps ports of closed connections for a minute (TIME_WAIT)
Config = dict[str, Any]  # of Ray Serve, as YAML has it

LOGS = Path(tempfile.gettempdir(), "ray/session_latest/logs/serve")

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# In text logs and in JSON logs.
_LEVEL = re.compile(r"""[ "](DEBUG|INFO|WARNING|ERROR|CRITICAL)[ "]""")
_SHOWN_LEVELS = ("WARNING", "ERROR", "CRITICAL")
_TRACE = re.compile(r"Traceback|Error:")
# Ray warns of every address but 0.0.0.0, for clusters of several nodes. Loopback is intended: see
# docs/operations.md.
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
        readable = isinstance(error, (OSError, yaml.YAMLError))
        reason = str(error) if readable else "it is not a config of Ray Serve: it has no `applications`"
        print(f"Headrace cannot start: {args.config}: {reason}", file=sys.stderr)
        return 1
    problem = wrong_settings(config)
    http = {"host": "127.0.0.1", "port": 8000} | ((not problem and config.get("http_options")) or {})
    if problem := problem or busy_port(http["host"], http["port"], serve_ports(config)):
        print(f"Headrace cannot start: {problem}", file=sys.stderr)
        return 1
    url = f"http://{http['host']}:{http['port']}"
    print(f"Starting Headrace from {args.config}. Logs: {LOGS}", flush=True)
    restore_sigint()
    server = subprocess.Popen(
        [sys.executable, "-m", "ray.serve.scripts", "run", str(args.config)],
        env={**RAY_SETTINGS, **os.environ, **({"HEADRACE_VERBOSE": "1"} if args.verbose else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,  # a terminal's Ctrl-C reaches this process alone; `stop` passes it on once
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
    # While the server stops, its stages log errors about each other's absence, which mean nothing.
    relay((line for line in server.stdout if args.verbose or not stopping.is_set()), args.verbose, stop)
    return server.wait()


def restore_sigint() -> None:
    """Stops ignoring SIGINT, on which alone `serve run` shuts down cleanly, HAProxy included.

    A shell without job control starts background processes with SIGINT ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def serve_ports(config: Config) -> dict[str, int]:
    env = config.get("controller_options") or {}
    for key in ("runtime_env", "env_vars"):
        env = env.get(key) or {}
    return {name: int(env.get(name, port)) for name, port in SERVE_PORTS.items()}


def busy_port(host: str, port: int, serve: dict[str, int]) -> str | None:
    """Returns one line about a port that is taken, or None. Waits for ports that are about to be released."""
    if not bindable(host, port):
        return f"port {port} is taken. Stop the server that uses it, or change http_options.port."
    deadline = time.monotonic() + RELEASE_S
    for name, number in serve.items():
        if not bindable("0.0.0.0", number) and RELEASE_S:
            print(f"Waiting up to {RELEASE_S:.0f} s for the OS to release port {number} ...", flush=True)
        while not bindable("0.0.0.0", number):
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            return (
                f"port {number} is taken, by another Ray Serve or an HAProxy that a killed server left behind"
                f" (`pgrep -a haproxy`). Stop it, or set {name} in the config's env_vars."
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


def wrong_settings(config: Config) -> str | None:
    """Returns one line about all settings that Serve or the application would refuse or ignore, or None."""
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


def unknown_keys(config: Config) -> Iterator[str]:
    """Yields a message for each unknown key of a valid config. Serve itself ignores such keys silently."""
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
                yield f"{place}deployments[{j}].name: {deployment['name']} is not one of {known}"
    for place, part, schema in parts:
        for key in part:
            if key not in schema.model_fields:
                yield f"{place}{key} is unknown; settings of Headrace belong under `args`"


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
    if ENVIRONMENT in os.environ and answers_without_key(url):
        print(
            f"Headrace cannot start: the Ray cluster was started without {ENVIRONMENT}."
            " Stop it with `ray stop` and start again.",
            file=sys.stderr,
        )
        give_up()
    else:
        seconds = time.monotonic() - start
        print(f"Headrace is ready at {url} after {seconds:.0f} s. Ctrl-C stops it.", flush=True)


def answers_without_key(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        with error:
            return error.code != 401


def is_worth_showing(line: str) -> bool:
    level = _LEVEL.search(line)  # the first one: the message may contain others
    is_bad = level.group(1) in _SHOWN_LEVELS if level else _TRACE.search(line)
    return bool(is_bad) and not _EXPECTED.search(line)


def relay(lines: Iterable[str], verbose: bool, give_up: Callable[[], object]) -> None:
    """Prints the lines that matter, until the server ends."""
    showing = False
    for line in lines:
        plain = _COLOUR.sub("", line)
        # Lines without a level, such as those of a traceback, belong to the log line before them.
        if _LEVEL.search(plain):
            showing = is_worth_showing(plain)
        if verbose or showing or is_worth_showing(plain):
            print(line if sys.stdout.isatty() else plain, end="", flush=True)
        if _DEPLOY_FAILED.search(plain):
            print("Headrace cannot start. The reason is above.", file=sys.stderr, flush=True)
            give_up()


if __name__ == "__main__":
    sys.exit(main())
