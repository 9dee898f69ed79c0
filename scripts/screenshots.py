"""Takes screenshots of the page and of Ray's dashboard, for a running server.

    python -m scripts.screenshots FOLDER [--url http://127.0.0.1:8000] [--dashboard http://127.0.0.1:8265]

Writes page-answered.png, page-dark.png, page-streaming.png (under load, so that the stages have work to
show), page-narrow.png, page-error.png, dashboard-serve.png and dashboard-application.png. Needs
chromedriver; see tests/support/browser.py.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Keys

from tests.support.browser import Browser

SAMPLES = Path(__file__).parent.parent / "docs" / "samples"
MIXED = [SAMPLES / name for name in ("photo.png", "sound.wav", "clip.mp4")]
ENDLESS = {"ignore_eos": True, "max_tokens": 3000}
CLIENTS = 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--dashboard", default="http://127.0.0.1:8265")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with Browser.start() as browser:
        for name, picture in [*page(browser, args.url), *dashboard(browser, args.dashboard)]:
            path = args.folder / f"{name}.png"
            path.write_bytes(picture)
            print(f"{path}: {len(picture) / 1000:.0f} kB")
    return 0


def page(browser: Browser, url: str) -> Iterator[tuple[str, bytes]]:
    browser.resize(1280, 1240)
    browser.open(url)
    ask(browser, "what do you see and hear?", MIXED)
    browser.wait("document.querySelector('article .waterfall')")
    browser.click(".seen summary")
    browser.wait("document.querySelector('.seen .waterfall')")
    browser.wait("[...document.querySelectorAll('video')].every((video) => video.readyState > 1)")
    yield "page-answered", browser.screenshot()
    browser.prefer("dark")
    yield "page-dark", browser.screenshot()
    browser.prefer("light")

    browser.resize(360, 740)
    browser.open(url)
    ask(browser, "what do you see and hear?", MIXED)
    browser.wait("document.querySelector('article .waterfall')")
    yield "page-narrow", browser.screenshot()

    browser.resize(1280, 900)
    browser.open(url)
    browser.drop(MIXED[:2])
    browser.script("attach([new File(['no image at all'], 'broken.png', {type: 'image/png'})])")
    ask(browser, "what do you see and hear?", [])
    browser.wait("document.querySelector('.error')")
    yield "page-error", browser.screenshot()

    browser.click("#new")
    browser.script("document.querySelector('#fields').value = arguments[0]", json.dumps(ENDLESS))
    with load(url):
        ask(browser, "what do you see and hear?", MIXED)
        browser.wait("document.querySelector('.answer').textContent.length > 300", 60)
        yield "page-streaming", browser.screenshot()
        browser.press(Keys.ESCAPE)


def ask(browser: Browser, question: str, files: list[Path]) -> None:
    browser.drop(files)
    browser.wait(f"document.querySelectorAll('#attached li').length >= {len(files)}")
    browser.type("#text", question + Keys.ENTER)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Mixed requests of a few clients at once."""
    done = threading.Event()
    body = json.dumps({"messages": [{"role": "user", "content": [*map(part, MIXED), "what?"]}]}).encode()

    def client() -> None:
        while not done.is_set():
            request = urllib.request.Request(f"{url}/v1/chat/completions", body)
            urllib.request.urlopen(request, timeout=60).close()

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def part(path: Path) -> dict[str, object]:
    kind = {".png": "image", ".wav": "audio", ".mp4": "video"}[path.suffix]
    uri = f"data:{kind}/{path.suffix[1:]};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": uri}}


def dashboard(browser: Browser, url: str) -> Iterator[tuple[str, bytes]]:
    browser.resize(1600, 1000)
    token = subprocess.run(
        [Path(sys.executable).with_name("ray"), "get-auth-token"], capture_output=True, text=True, check=True
    ).stdout.strip()
    browser.cdp("Network.enable")
    browser.cdp("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {token}"})
    for name, path, shown in [
        ("dashboard-serve", "/#/serve", "headrace"),
        ("dashboard-application", "/#/serve/applications/headrace", "MMPreprocessor"),
    ]:
        browser.open(url + path)
        browser.wait(f"document.body.innerText.includes('{shown}')", 60)
        yield name, browser.screenshot()


if __name__ == "__main__":
    sys.exit(main())
