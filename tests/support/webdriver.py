"""A headless Chromium, driven over the W3C's WebDriver protocol: JSON over HTTP, so urllib is client enough.

Needs Debian's packages chromium and chromium-driver, or others that bring `chromedriver`.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
WAIT_S = 20.0

ENTER, ESCAPE, TAB, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue008"

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # it runs as root in containers
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-prefers-reduced-motion",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",
)


_STARTS = 5


class WebDriverError(Exception):
    """What the driver answered instead of a value."""


@contextmanager
def _driver() -> Iterator[int]:
    """Its port. The one that it takes for IPv6 may be taken for IPv4; it ends then, and is started again."""
    for _ in range(_STARTS):
        driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            assert driver.stdout is not None
            started = next((line for line in driver.stdout if "started successfully on port" in line), None)
            if started:
                yield int(started.strip().rstrip(".").rpartition(" ")[2])
                return
        finally:
            driver.terminate()
            driver.communicate()
    raise WebDriverError(f"{DRIVER} did not start")


class Browser:
    def __init__(self, session: str) -> None:
        self._session = session

    @classmethod
    @contextmanager
    def start(cls, width: int = 1280, height: int = 900) -> Iterator[Browser]:
        assert DRIVER is not None
        with _driver() as port:
            url = f"http://127.0.0.1:{port}/session"
            options = {
                "args": [*_ARGUMENTS, f"--window-size={width},{height}"],
                "binary": shutil.which("chromium") or "",
            }
            chrome = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = f"{url}/{_call('POST', url, capabilities={'alwaysMatch': chrome})['sessionId']}"
            try:
                yield cls(session)
            finally:
                _call("DELETE", session)

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def script(self, code: str, *args: object) -> Any:
        """What the function body `code` returns; it finds the arguments in `arguments`."""
        return self._post("execute/sync", script=code, args=args)

    def text(self, css: str) -> str:
        """All text of the matching elements, hidden ones left out."""
        return "\n".join(self.script(_TEXT, css))

    def click(self, css: str) -> None:
        self._post(f"element/{self._find(css)}/click")

    def type(self, css: str, keys: str) -> None:
        """Keys into an element; into a file input, paths."""
        self._post(f"element/{self._find(css)}/value", text=keys)

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus, all of them held down together."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp") for key in keys]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def write(self, text: str) -> None:
        for character in text:
            self.press(character)

    def wait(self, condition: str, timeout_s: float = WAIT_S) -> Any:
        """Polls a JavaScript expression until it is true, and gives its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.script(f"return {condition}")):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}\n{self.text('body')}"
            time.sleep(0.02)
        return value

    def cdp(self, command: str, /, **params: object) -> Any:
        """Chrome's own protocol, for what WebDriver does not have."""
        return self._post("goog/cdp/execute", cmd=command, params=params)

    def drop(self, files: list[Path]) -> None:
        """Files from the desktop onto the middle of the page."""
        x, y = self.script("return [innerWidth / 2, innerHeight / 2]")
        data = {"items": [], "files": [str(path.resolve()) for path in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.cdp("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def resize(self, width: int, height: int) -> None:
        """Of the page; a window can not be as narrow as a phone."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self) -> bytes:
        """A PNG of what is visible."""
        return base64.b64decode(_call("GET", f"{self._session}/screenshot"))

    def complaints(self) -> list[str]:
        """What the console has shown since the last call, such as breaches of the content security policy."""
        return [entry["message"] for entry in self._post("se/log", type="browser")]

    def _find(self, css: str) -> str:
        element: str = self._post("element", using="css selector", value=css)[_ELEMENT]
        return element

    def _post(self, command: str, /, **params: object) -> Any:
        return _call("POST", f"{self._session}/{command}", **params)


_TEXT = """return [...document.querySelectorAll(arguments[0])]
    .filter((node) => node.checkVisibility()).map((node) => node.innerText)"""


def _call(method: str, url: str, /, **params: object) -> Any:
    data = json.dumps(params).encode() if method == "POST" else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        raise WebDriverError(json.load(error)["value"]["message"]) from None
