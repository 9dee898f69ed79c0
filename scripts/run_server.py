"""Starts `serve run` with checks before, a word when it is ready, and a clean end. For scripts/serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml

HAPROXY_PORTS = {"stats": 8404, "metrics": 9101}


def main() -> int:
    config = Path(sys.argv[1] if len(sys.argv) > 1 else "serve_config.yaml")
    http = yaml.safe_load(config.read_text()).get("http_options", {})
    host, port = http.get("host", "127.0.0.1"), http.get("port", 8000)
    if problem := busy_port(host, port):
        print(problem, file=sys.stderr)
        return 1
    print(f"Starting Headrace from {config} ...", flush=True)
    server = subprocess.Popen(
        [sys.executable, "-m", "ray.serve.scripts", "run", str(config)],
        env=environment(),
        start_new_session=False,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop(server))
    threading.Thread(target=announce, args=(server, f"http://{host}:{port}"), daemon=True).start()
    return server.wait()


def environment() -> dict[str, str]:
    # Ray starts workers at niceness 15; at 0, only the pools of heavy work stand back.
    return {"RAY_worker_niceness": "0", **os.environ}


def busy_port(host: str, port: int) -> str | None:
    """One line that says what is in the way."""
    if not bindable(host, port):
        return f"Port {port} is taken. Is Headrace running already? Stop it, or change http_options.port."
    for name, number in HAPROXY_PORTS.items():
        if not bindable("0.0.0.0", number):
            return (
                f"HAProxy's {name} port {number} is taken, likely by an HAProxy that a killed server left behind:"
                f" end it (`pgrep -a haproxy`), or set RAY_SERVE_HAPROXY_{name.upper()}_PORT in env_vars."
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


def announce(server: subprocess.Popen[bytes], url: str) -> None:
    start = time.monotonic()
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                print(
                    f"Headrace is ready at {url} after {time.monotonic() - start:.0f} s. Ctrl-C stops it.",
                    flush=True,
                )
                return
        except OSError:
            time.sleep(0.2)


def stop(server: subprocess.Popen[bytes]) -> None:
    """`serve run` shuts down cleanly, HAProxy included, on SIGINT alone."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
