import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import launcher
from app.http.auth import ENVIRONMENT
from app.launcher import SERVE_PORTS, announce, busy_port, relay, serve_ports, wrong_settings
from tests.support.paths import ROOT

CONFIG = ROOT / "serve_config.yaml"


def served(**application: Any) -> dict[str, Any]:
    return {"applications": [{"import_path": "app.graph:build", **application}]}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_busy_port_is_reported_in_one_line(taken: int) -> None:
    assert busy_port("127.0.0.1", taken, {}) == (
        f"port {taken} is taken. Stop the server that uses it, or change http_options.port."
    )


def test_a_stale_haproxy_is_reported_in_one_line(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "RELEASE_S", 0.0)
    problem = busy_port("127.0.0.1", 0, {"RAY_SERVE_HAPROXY_STATS_PORT": taken})
    assert problem is not None
    assert problem.startswith(f"port {taken} is taken, by another Ray Serve or an HAProxy")
    assert "set RAY_SERVE_HAPROXY_STATS_PORT" in problem
    assert "\n" not in problem


def test_a_server_that_a_script_starts_in_the_background_can_be_stopped() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launcher.restore_sigint()
        ignored = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
        assert subprocess.check_output([sys.executable, "-c", ignored], text=True) == "False\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_free_ports_are_no_problem() -> None:
    assert busy_port("127.0.0.1", 0, {"any": 0}) is None


@pytest.mark.parametrize("options", [None, {}, {"runtime_env": None}])
def test_serve_has_its_default_ports_unless_the_config_sets_them(options: dict[str, Any] | None) -> None:
    assert serve_ports({"controller_options": options}) == SERVE_PORTS


def test_ports_in_the_config_replace_the_defaults() -> None:
    env = {"runtime_env": {"env_vars": {"RAY_SERVE_HAPROXY_STATS_PORT": "1234"}}}
    assert serve_ports({"controller_options": env}) == SERVE_PORTS | {"RAY_SERVE_HAPROXY_STATS_PORT": 1234}


def test_a_wrong_setting_is_named() -> None:
    args = {"media_loader": {"thread": 2}, "modle": "x", "timeout_s": "soon"}
    assert wrong_settings(served(args=args)) == (
        "args.timeout_s must be a number; args.media_loader.thread is not known here;"
        " args.modle is not known here"
    )
    assert wrong_settings(served()) is None
    assert wrong_settings(yaml.safe_load(CONFIG.read_text())) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**served(), "timeout_s": 3}, "timeout_s is unknown; settings of Headrace belong under `args`"),
        (served(timeout_s=3), "applications[0].timeout_s is unknown; settings of Headrace belong"),
        ({**served(), "http_options": {"prot": 1}}, "http_options.prot is unknown"),
        (served(deployments=None), "applications[0].deployments: Input should be a valid list"),
        ({**served(), "http_options": None}, "http_options: Input should be a valid dictionary"),
        (
            served(deployments=[{"name": "MMPreprocesor"}]),
            "applications[0].deployments[0].name: MMPreprocesor is not one of Ingress, Tokenizer,",
        ),
        (
            served(deployments=[{"name": "Model", "num_replica": 2}]),
            "applications[0].deployments[0].num_replica is",
        ),
        (
            served(deployments=[{"name": "Model", "num_replicas": 0}]),
            "applications[0].deployments[0].num_replicas.constrained-int: Input should be greater than 0",
        ),
        (served(args={"model": "/models/nope"}), "args: model '/models/nope': there is no such folder"),
    ],
)
def test_settings_that_serve_would_ignore_or_fail_on_are_named(config: dict[str, Any], message: str) -> None:
    assert str(wrong_settings(config)).startswith(message)


LINES = [
    "(ServeController pid=1) INFO 2026-01-01 controller -- quiet\n",
    "(ServeReplica:headrace:Model pid=2) WARNING 2026-01-01 model -- look here\n",
    "(ServeReplica:headrace:Model pid=2)   and here\n",
    "(ServeReplica:headrace:Model pid=2) INFO 2026-01-01 model -- CALL generate ERROR 3.8ms\n",
    "(ServeController pid=1) WARNING 2026-01-01 controller -- HTTPOptions.host='127.0.0.1' won't accept"
    " connections from HAProxy on other nodes\n",
]


AS_JSON = [
    '(ServeReplica:headrace:Model pid=2) {"levelname": "INFO", "message": "quiet"}\n',
    '(ServeReplica:headrace:Model pid=2) {"levelname": "WARNING", "message": "look here"}\n',
]


@pytest.mark.parametrize(
    ("lines", "verbose", "shown"),
    [(LINES, False, LINES[1:3]), (LINES, True, LINES), (AS_JSON, False, AS_JSON[1:])],
)
def test_only_warnings_and_errors_are_shown(
    lines: list[str], verbose: bool, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    relay(lines, verbose, lambda: None)
    assert capsys.readouterr().out == "".join(shown)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        ("a: [", "expected"),
        ("- a", "not a config of Ray Serve"),
        ("{}", "not a config"),
    ],
)
def test_an_unusable_config_file_is_reported_in_one_line(
    content: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "config.yaml"
    if content is not None:
        config.write_text(content)
    monkeypatch.setattr(sys, "argv", ["launcher", str(config)])
    assert launcher.main() == 1
    error = capsys.readouterr().err
    assert error.startswith(f"Headrace cannot start: {config}: ")
    assert reason in error.replace(str(config), "")


@pytest.mark.parametrize(
    "line",
    [
        "Deploying app 'headrace' failed with exception:\n",
        "Failed to update the deployments ['Tokenizer', 'Model'].\n",
    ],
)
def test_a_failed_deployment_ends_the_server(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    given_up = []
    relay([f"ERROR controller 1 -- {line}"], False, lambda: given_up.append(1))
    assert given_up == [1]
    assert "Headrace cannot start" in capsys.readouterr().err


class Healthy(BaseHTTPRequestHandler):
    asks_for_keys = True

    def do_GET(self) -> None:
        self.send_response(401 if self.asks_for_keys and self.path != "/health" else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def healthy() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("key", "asks", "refused"),
    [(None, False, False), ("sk-1", True, False), ("sk-1", False, True)],
    ids=["open", "protected", "meant to be protected"],
)
def test_a_server_that_the_keys_did_not_reach_is_ended(
    key: str | None,
    asks: bool,
    refused: bool,
    healthy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Healthy, "asks_for_keys", asks)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    if key:
        monkeypatch.setenv(ENVIRONMENT, key)
    given_up = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        announce(process, healthy, lambda: given_up.append(1))
        process.communicate("\n")
    output = capsys.readouterr()
    assert bool(given_up) == refused
    assert ("is ready" in output.out) != refused
    assert ("was started without" in output.err) == refused
