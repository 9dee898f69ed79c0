"""A headless Chromium, driven by Selenium.

Needs Debian's packages chromium and chromium-driver, or others that provide `chromedriver`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

DRIVER = shutil.which("chromedriver")
WAIT_S = 20.0
POLL_S = 0.02

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # Chromium's sandbox does not run as root, as in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-prefers-reduced-motion",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",
)

_TEXT = """return [...document.querySelectorAll(arguments[0])]
    .filter((node) => node.checkVisibility()).map((node) => node.innerText).join("\\n")"""


class Browser:
    """One page, addressed with CSS selectors and JavaScript expressions."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    @classmethod
    @contextmanager
    def start(cls, width: int = 1280, height: int = 900) -> Iterator[Browser]:
        with TemporaryDirectory(prefix="headrace-chromium-", ignore_cleanup_errors=True) as profile:
            options = ChromeOptions()
            options.binary_location = shutil.which("chromium") or ""
            for argument in (*_ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
                options.add_argument(argument)
            options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
            # With the driver's path given, Selenium does not look for one to download.
            with Chrome(options, ChromeService(DRIVER)) as driver:
                yield cls(driver)

    def open(self, url: str) -> None:
        self._driver.get(url)

    def script(self, code: str, *args: object) -> Any:
        """Runs `code` as a function body, with `args` in `arguments`, and returns its value."""
        return self._driver.execute_script(code, *args)

    def text(self, css: str) -> str:
        """Returns the text of all visible elements that match."""
        return str(self.script(_TEXT, css))

    def click(self, css: str) -> None:
        self._find(css).click()

    def type(self, css: str, keys: str) -> None:
        """Types keys into an element; a file input takes paths."""
        self._find(css).send_keys(keys)

    def press(self, *keys: str) -> None:
        """Presses keys together, in the element that has the focus."""
        actions = ActionChains(self._driver)
        for key in keys:
            actions.key_down(key)
        for key in keys:
            actions.key_up(key)
        actions.perform()

    def write(self, text: str) -> None:
        """Types a text into the element that has the focus."""
        ActionChains(self._driver).send_keys(text).perform()

    def wait(self, condition: str, timeout_s: float = WAIT_S) -> None:
        """Waits until a JavaScript expression is true."""
        WebDriverWait(self._driver, timeout_s, POLL_S).until(
            lambda _: self.script(f"return Boolean({condition})"), f"{condition} is not true"
        )

    def cdp(self, command: str, **params: object) -> None:
        """Runs a command of Chrome's own protocol, for features that WebDriver lacks."""
        self._driver.execute_cdp_cmd(command, params)

    def drop(self, files: list[Path]) -> None:
        """Drops files from the desktop onto the middle of the page."""
        x, y = self.script("return [innerWidth / 2, innerHeight / 2]")
        data = {"items": [], "files": [str(path.resolve()) for path in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.cdp("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the page. A window cannot be as narrow as a phone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str) -> None:
        """Sets the preferred colour scheme, `light` or `dark`."""
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self) -> bytes:
        """Returns a PNG of the visible part."""
        return self._driver.get_screenshot_as_png()

    def console(self) -> list[str]:
        """Returns the console's messages since the last call."""
        return [str(entry["message"]) for entry in self._driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def _find(self, css: str) -> WebElement:
        return self._driver.find_element(By.CSS_SELECTOR, css)
