"""Sends mixed traffic at saturation over HTTP: is any request lost, and does memory stay flat?

    python -m scripts.soak MINUTES [--overload SECONDS]

Starts the shipped server on ports of its own, with caches small enough to fill soon. Requests are texts,
images, sounds, videos and embeddings, new and repeated ones, whole and streamed, with several answers, stop
strings and logprobs. Some clients leave before or during the answer, and some requests are invalid. The
number of open requests grows as long as the median answer takes less than ANSWER_S; a refusal for lack of
room lowers it.

Every request has one outcome: answered (completely: each answer has its end), left (as planned), invalid (and
refused with a 4xx), refused (503). Anything else is a fault: another status, a stream that breaks off, or a
request that hangs longer than HUNG_S, which is longer than any deadline. With `--overload`, three times the
number of requests that the server takes are open for SECONDS at the end; then it must answer as before.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from tests.support.cluster import Server, marked, read
from tests.support.synthetic_media import Modality, make_item, write_audio, write_clip, write_image

ANSWER_S = 3.0
HUNG_S = 150.0
MOST_OPEN = 300
OVERLOAD = 1000
PACE_S = 2.0  # between changes of how many are open
SAMPLE_S = 5.0  # between looks at memory
KNOWN = 12  # items of a modality; the rest of them is new each time
WARM_UP = 0.4  # of the time, at most 5 minutes: caches fill
GROWTH = 0.05  # of its memory that a process may gain after that, or
GROWTH_MIB = 24.0

Body = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("minutes", type=float)
    parser.add_argument("--overload", type=float, default=0, metavar="SECONDS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        media = Media(Path(folder))
        with Server.start(Path(folder), small_caches) as server:
            sys.exit(asyncio.run(soak(server, media, options.minutes * 60, options.overload)))


def small_caches(config: Body) -> None:
    config["applications"][0]["args"] |= {
        "mm_preprocessor": {"cache_bytes": 16 * 2**20},
        "engine": {"encoder_cache_bytes": 4 * 2**20},
    }


async def soak(server: Server, media: Media, seconds: float, overload_s: float) -> int:
    """The exit status."""
    with server.object_store() as store, server.engine() as engine:
        memory = Memory(server, store)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            traffic = Traffic(session, server.url, media)
            await traffic.run(seconds, memory)
            faults = traffic.report()
            if overload_s:
                faults += await overload(session, server.url, media, overload_s)
        await asyncio.sleep(2 * SAMPLE_S)  # until abandoned requests are released
        left = await asyncio.to_thread(engine)
        busy = {name: left[name] for name in ("running", "waiting", "kv_tokens_used")}
        print(f"\nthe engine at the end: {busy}; {left['generated_tokens']} tokens in {left['steps']} steps,")
        print(f"{left['preemptions']} preemptions; object store {store()[1] / 2**20:.1f} MiB")
        faults += sum(busy.values())
    grown = memory.verdict()
    print(f"\n{'FAULTS' if faults else 'nothing lost, nothing hung'}; {grown or 'memory flat'}")
    return int(bool(faults or grown))


class Traffic:
    def __init__(self, session: aiohttp.ClientSession, url: str, media: Media) -> None:
        self._session, self._url, self._media = session, url, media
        self._sent: Counter[str] = Counter()
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._open = 4  # as many as there should be
        self._times: list[float] = []  # s, of answers since the last change
        self._all: list[float] = []
        self._refused = 0  # since the last change

    async def run(self, seconds: float, memory: Memory) -> None:
        end = time.monotonic() + seconds
        clients = [asyncio.create_task(self._client(number, end)) for number in range(MOST_OPEN)]
        watch = asyncio.create_task(memory.watch(seconds, self._line))
        while time.monotonic() < end:
            await asyncio.sleep(PACE_S)
            self._adjust()
        await asyncio.gather(*clients)
        await watch

    def _adjust(self) -> None:
        if self._refused:
            self._open = max(4, int(self._open * 0.8))
        elif len(self._times) > 4:
            slow = statistics.median(self._times) > ANSWER_S
            self._open = max(4, min(MOST_OPEN, int(self._open * (0.9 if slow else 1.1)) + (not slow)))
        self._times.clear()
        self._refused = 0

    async def _client(self, number: int, end: float) -> None:
        rng = np.random.default_rng(number)
        while time.monotonic() < end:
            if number < self._open:
                await self._one(rng)
            else:
                await asyncio.sleep(0.2)

    async def _one(self, rng: np.random.Generator) -> None:
        kind = str(rng.choice(list(KINDS), p=SHARES))
        body, leaves = self._media.request(kind, rng)
        self._sent[kind] += 1
        start = time.monotonic()
        outcome = await attempt(self._session, self._url, body, leaves)
        took = time.monotonic() - start
        self._outcomes[kind][outcome] += 1
        if outcome == "refused":
            self._refused += 1
            await asyncio.sleep(1)  # as Retry-After says
        elif outcome == "answered":
            self._times.append(took)
            self._all.append(took)

    def _line(self) -> str:
        total: Counter[str] = sum(self._outcomes.values(), Counter())
        return f"{self._open:4} open, {total.total():6} done, {total['refused']:4} refused"

    def report(self) -> int:
        """The number of faults."""
        print(f"\n{'':10}{'sent':>8}" + "".join(f"{name:>10}" for name in FINE) + "  faults")
        faults = 0
        for kind, sent in self._sent.items():
            outcomes = self._outcomes[kind]
            expected = "wrong" if kind == "wrong" else "answered"
            others = {name: n for name, n in outcomes.items() if name not in (expected, "left", "refused")}
            lost = sent - outcomes.total()
            faults += sum(others.values()) + lost
            figures = "".join(f"{outcomes[name]:10}" for name in FINE)
            print(f"{kind:10}{sent:8}{figures}  {others or ''}{f' {lost} LOST' if lost else ''}")
        p50, p99 = np.percentile(self._all, [50, 99])
        print(f"answers: p50 {p50:.2f} s, p99 {p99:.2f} s", flush=True)
        return faults


FINE = ("answered", "left", "wrong", "refused")


async def attempt(session: aiohttp.ClientSession, url: str, body: Body | bytes, leaves: float) -> str:
    """Returns the outcome. `leaves`: seconds after which the client closes the connection; 0: never."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        async with (
            asyncio.timeout(leaves or HUNG_S),
            session.post(
                f"{url}/v1/chat/completions",
                data=data,
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
            ) as response,
        ):
            answer = await response.read()
            if response.status != 200:
                return {503: "refused"}.get(
                    response.status, "wrong" if response.status < 500 else f"status {response.status}"
                )
            return "answered" if isinstance(body, bytes) or is_whole(body, answer) else "broken off"
    except TimeoutError:
        return "left" if leaves else "hung"
    except aiohttp.ClientError as error:
        return f"no answer ({type(error).__name__})"


def is_whole(body: Body, answer: bytes) -> bool:
    wanted = list(range(body.get("n", 1)))
    if not body.get("stream"):
        choices = json.loads(answer)["choices"]
        return [choice["index"] for choice in choices] == wanted and all(c["finish_reason"] for c in choices)
    *events, done = answer.decode().strip().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    ended = [c["index"] for chunk in chunks for c in chunk.get("choices", []) if c["finish_reason"]]
    return done == "data: [DONE]" and sorted(ended) == wanted


async def overload(session: aiohttp.ClientSession, url: str, media: Media, seconds: float) -> int:
    end = time.monotonic() + seconds
    outcomes: Counter[str] = Counter()

    async def client(number: int) -> None:
        rng = np.random.default_rng(number)
        while time.monotonic() < end:
            body, _ = media.request("text", rng)
            outcomes[await attempt(session, url, body, 0)] += 1

    await asyncio.gather(*(client(number) for number in range(OVERLOAD)))
    body, _ = media.request("text", np.random.default_rng(0))
    start = time.monotonic()
    after = await attempt(session, url, body, 0)
    print(f"\n{OVERLOAD} clients at once that come again at once: {dict(outcomes)};")
    print(f"one request after that: {after} in {time.monotonic() - start:.2f} s")
    return outcomes.total() - outcomes["answered"] - outcomes["refused"] + (after != "answered")


class Media:
    """Content of requests, made before the clock starts."""

    def __init__(self, folder: Path) -> None:
        self._serial = itertools.count()
        self._files: dict[str, list[bytes]] = {
            modality: [_encoded(folder, modality, i) for i in range(KNOWN)]
            for modality in ("image", "audio", "video")
        }

    def request(self, kind: str, rng: np.random.Generator) -> tuple[Body | bytes, float]:
        """And after how many seconds its client leaves; 0: it stays."""
        if kind == "wrong":
            wrong = _WRONG[rng.integers(len(_WRONG))]
            return wrong if isinstance(wrong, bytes) else {"messages": [_user(["hello"])], **wrong}, 0
        content: list[object] = [self._part(modality, rng) for modality in _ITEMS.get(kind, ())]
        words = " ".join(f"word{i}" for i in rng.integers(0, 1000, int(rng.integers(1, 120))))
        body: Body = {
            "messages": [_user([*content, f"{words}. What do you see and hear?"])],
            "max_tokens": int(rng.integers(1, 160)),
            "stream": bool(rng.random() < 0.5),
            "ignore_eos": bool(rng.random() < 0.7),
            "temperature": float(rng.choice([0.0, 1.5])),
        }
        if kind == "several":
            body |= {"n": 3, "stop": ["e", "re"], "temperature": 2, "logprobs": True, "top_logprobs": 3}
        if rng.random() < 0.1:
            body |= {"presence_penalty": 1, "repetition_penalty": 1.3, "top_p": 0.9, "seed": 1}
        return body, float(rng.uniform(0.01, ANSWER_S)) if kind == "leaves" else 0

    def _part(self, modality: str, rng: np.random.Generator) -> Body:
        if modality == "embeds":
            grid = {"image_grid_thw": [1, 6, 6], "image_embeds": _npy(rng.normal(size=(9, 128)))}
            return {"type": "image_embeds", "image_embeds": grid}
        if modality == "prompt":
            return {"type": "prompt_embeds", "data": _npy(rng.normal(size=(int(rng.integers(1, 400)), 128)))}
        data = self._files[modality][rng.integers(KNOWN)]
        if rng.random() < 0.5:
            data = _unlike(modality, data, next(self._serial))
        url = f"data:{_MIME[modality]};base64,{base64.b64encode(data).decode()}"
        return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


_ITEMS = {
    "image": ["image"],
    "audio": ["audio"],
    "video": ["video"],
    "mixed": ["image", "audio", "video", "image"],
    "embeds": ["embeds", "prompt"],
    "leaves": ["image", "video"],
}
KINDS = {
    "text": 30,
    "image": 15,
    "audio": 10,
    "video": 5,
    "mixed": 5,
    "embeds": 8,
    "several": 7,
    "leaves": 12,
    "wrong": 8,
}
SHARES = np.array(list(KINDS.values())) / sum(KINDS.values())
_MIME = {"image": "image/jpeg", "audio": "audio/wav", "video": "video/mp4"}
_SUFFIX = {"image": ".jpg", "audio": ".wav", "video": ".mp4"}
_WRONG: list[Body | bytes] = [
    b"{",
    b"[]",
    {"messages": []},
    {"n": -1},
    {"model": "gpt-7"},
    {"tools": [{}]},
    {"max_tokens": "many"},
    {"logit_bias": {"999999": 1}},
    {"messages": [{"role": "user", "content": "a " * 20_000}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm8gaW1hZ2U="}},
                    {"type": "audio_url", "audio_url": {"url": "http://10.0.0.1/a.wav"}},
                ],
            }
        ]
    },
]


def _user(content: list[object]) -> Body:
    parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in content]
    return {"role": "user", "content": parts}


def _encoded(folder: Path, modality: Modality, index: int) -> bytes:
    path = folder / f"{index}{_SUFFIX[modality]}"
    write: dict[str, Callable[..., None]] = {"image": write_image, "audio": write_audio, "video": write_clip}
    write[modality](path, make_item(modality, 0, index).data)
    return path.read_bytes()


def _unlike(modality: str, data: bytes, serial: int) -> bytes:
    """The same to a decoder, in other bytes."""
    if modality == "image":
        return data + struct.pack(">Q", serial)
    if modality == "video":
        return data + struct.pack(">I4sQ", 16, b"free", serial)
    samples = np.frombuffer(data[-200:], np.uint8) ^ np.uint8(1 + serial % 7)
    return data[:-208] + struct.pack("<Q", serial) + samples.tobytes()


def _npy(array: NDArray[np.float64]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array.astype(np.float32))
    return base64.b64encode(buffer.getvalue()).decode()


class Memory:
    """Returns the private memory of each process of the server, and the size of the object store."""

    def __init__(self, server: Server, store: Callable[[], tuple[int, int]]) -> None:
        self._server, self._store = server, store
        self._begun = time.monotonic()
        self._seconds = 0.0
        self._rows: list[tuple[float, dict[str, float]]] = []  # s since the begin, MiB of each process

    async def watch(self, seconds: float, line: Callable[[], str]) -> None:
        self._begun, self._seconds = time.monotonic(), seconds
        busy, at = _busy_s(), self._begun
        while (now := time.monotonic() - self._begun) < seconds:
            sizes = await asyncio.to_thread(self._look)
            self._rows.append((now, sizes))
            if len(self._rows) % 6 == 1:
                cores = (_busy_s() - busy) / max(time.monotonic() - at, 0.01)
                busy, at = _busy_s(), time.monotonic()
                replicas = ", ".join(f"{name} {mib:.0f}" for name, mib in sizes.items() if name in _STAGES)
                print(
                    f"{now / 60:5.1f} min {line()}, {cores:.1f} of {os.cpu_count()} cores;"
                    f" MiB: all {sum(sizes.values()):.0f}, store {sizes['object store']:.1f}, {replicas}",
                    flush=True,
                )
            await asyncio.sleep(SAMPLE_S)

    def _look(self) -> dict[str, float]:
        sizes: dict[str, float] = defaultdict(float)
        for pid in marked(self._server.mark):
            own = read(f"/proc/{pid}/status").partition("RssAnon:")[2].split()
            if own:
                sizes[_name(pid)] += int(own[0]) / 1024
        sizes["object store"] = self._store()[1] / 2**20
        return sizes

    def verdict(self) -> str:
        """Returns a description of what grew; empty if nothing did."""
        warm = min(WARM_UP * self._seconds, 300)
        rows = [(at, sizes) for at, sizes in self._rows if at >= warm]
        minutes = np.array([at for at, _ in rows]) / 60
        grown = []
        print(f"\nafter the first {warm / 60:.1f} minutes{'':10}{'MiB':>8}{'MiB/min':>9}{'gained':>8}")
        for name in sorted({name for _, sizes in rows for name in sizes}):
            values = np.array([sizes.get(name, 0.0) for _, sizes in rows])
            slope = float(np.polyfit(minutes, values, 1)[0])
            gained = slope * (minutes[-1] - minutes[0])
            print(f"{name:34}{values.mean():8.1f}{slope:9.2f}{gained:8.1f}")
            if gained > max(GROWTH_MIB, GROWTH * float(values.mean())):
                grown.append(f"{name} grew by {gained:.0f} MiB")
        return "; ".join(grown)


_STAGES = ("Ingress", "Tokenizer", "MediaLoader", "EmbeddingLoader", "MMPreprocessor", "Model")


def _name(pid: int) -> str:
    command: str = read(f"/proc/{pid}/cmdline").replace("\0", " ")
    if "ServeReplica:headrace:" in command:
        return command.partition("ServeReplica:headrace:")[2].split(".")[0].split()[0]
    program = Path(command.split(" ")[0] or "gone").name
    if program.startswith("ray::"):
        return program.split(".")[0]
    return program if program in ("haproxy", "raylet", "gcs_server") else "rest of Ray"


def _busy_s() -> float:
    fields = [int(field) for field in read("/proc/stat").splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
