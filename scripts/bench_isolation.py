"""Measures how media work affects other requests, and the cost of the graph, in about five minutes.

    python -m scripts.bench_isolation [PART ...]

Starts the shipped server on ports of its own, with a tiny random Qwen2.5-VL (`max_pixels` 200704). Every
image is new, so that no cache answers. PARTs, all by default:

tokenize  a prompt of 300 words through `Tokenizer`, while 4 images are in preprocessing; the same in one
          process, with one thread pool for all and with a pool for each
http      time to first token of a text while 8 requests with a 12 MP JPEG are in flight, the longest wait
          for /health, image requests a second, and the CPU time of one by process
replicas  12 MP images through 1 and 2 replicas of `MMPreprocessor`, against the processor alone in a loop;
          one request with 20 images, and another request's single image at the same time
latency   a request with one image against one process that does the same work in a row, alternating

Each figure comes with the load of other programs on the machine, in cores: on a busy machine figures say
little.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parent.parent
os.environ["RAY_AUTH_MODE"] = "token"  # as local clusters have it; Ray reads it when it is imported

import numpy as np  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.handle import DeploymentHandle  # noqa: E402

from deployments.media import image  # noqa: E402
from deployments.media.image import ImageLimits  # noqa: E402
from deployments.runtime.payload import pack, unpack  # noqa: E402
from deployments.types import Arrays, Chat, Media, Modality  # noqa: E402
from scripts.bench_media import jpeg  # noqa: E402
from tests.support.cluster import ServeConfig, Server, argument, marked, read  # noqa: E402
from tests.support.tiny_models import qwen_vl  # noqa: E402

MAX_PIXELS = 200704
SIZES = {"512²": (512, 512), "1024²": (1024, 1024), "2048²": (2048, 2048), "12 MP": (4000, 3000)}
PREPROCESSING = 4  # images in flight
REQUESTS = 8
MANY = 20
SECONDS = 6.0  # of each measurement
PAUSE_S = 0.03  # between texts
WARM_UP_S = 2.0
LATENCY_N = 25
PROMPT = " ".join(f"word{i % 97} and" for i in range(150))
TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        CHILDREN[args.child[0]](args.child[1])
        return
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    model = qwen_vl(patch_size=14, max_pixels=MAX_PIXELS, context=8192)
    parts = args.parts or PARTS
    if set(parts) & ON_ONE_SERVER.keys():
        with running(model) as server:
            for name, part in ON_ONE_SERVER.items():
                if name in parts:
                    part(server, model)
    if "replicas" in parts:
        replicas(model)


# The server, and what else runs


@contextmanager
def running(model: str, preprocessors: int = 1) -> Iterator[Server]:
    def change(config: ServeConfig) -> None:
        application = config["applications"][0]
        application["args"]["model"] = model
        for deployment in application["deployments"]:
            if deployment["name"] == "MMPreprocessor":
                deployment["num_replicas"] = preprocessors

    with tempfile.TemporaryDirectory() as folder, Server.start(Path(folder), change) as server:
        yield server


@contextmanager
def handles(address: str) -> Iterator[Callable[[str], DeploymentHandle]]:
    """Handles to the stages of a running server, by their names."""
    ray.init(
        address,
        namespace="serve",
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield lambda name: serve.get_deployment_handle(name, "headrace")
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds since the start of the machine, and of the server's processes by what they are."""

    machine: float
    processes: dict[str, float]
    at: float

    @classmethod
    def now(cls, mark: str) -> Cpu:
        fields = [int(field) for field in read("/proc/stat").splitlines()[0].split()[1:]]
        busy = (sum(fields[:8]) - fields[3] - fields[4]) / _TICKS
        seconds: dict[str, float] = defaultdict(float)
        for pid in [*marked(mark), os.getpid()]:
            seconds[_name(pid)] += _cpu_s(pid)
        return cls(busy, seconds, time.perf_counter())

    def since(self, before: Cpu) -> tuple[dict[str, float], float]:
        """CPU seconds by process, and the cores that others than these took."""
        used = {name: seconds - before.processes.get(name, 0.0) for name, seconds in self.processes.items()}
        others = (self.machine - before.machine - sum(used.values())) / (self.at - before.at)
        return used, others


_TICKS = os.sysconf("SC_CLK_TCK")


def _cpu_s(pid: int) -> float:
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _name(pid: int) -> str:
    command: str = read(f"/proc/{pid}/cmdline").replace("\0", " ")
    if pid == os.getpid():
        return "client"
    if "ServeReplica:headrace:" in command:
        return command.partition("ServeReplica:headrace:")[2].split(".")[0].split()[0]
    program = Path(command.split(" ")[0]).name
    return program if program in ("haproxy", "raylet", "gcs_server") else "rest of Ray"


def print_times(name: str, times: list[float], idle: list[float] | None = None, note: str = "") -> None:
    p50, p99 = percentile(times, 50), percentile(times, 99)
    ratio = ""
    if idle:
        ratio = f"   x idle {p50 / percentile(idle, 50):4.2f} / {p99 / percentile(idle, 99):4.2f}"
    print(f"  {name:<34} p50 {p50:7.2f}  p99 {p99:7.2f} ms (n {len(times)}){ratio}   {note}", flush=True)


def percentile(times: list[float], percent: float) -> float:
    return float(np.percentile(times, percent))


# Tokenization while images are in preprocessing


def tokenize(server: Server, model: str) -> None:
    print(f"\nTokenizing 300 words, {PREPROCESSING} images in preprocessing")
    with handles(argument(server.mark, "--gcs-address=")) as stage:
        asyncio.run(_tokenize(server, stage("Tokenizer")))
    for pools in ("shared", "own"):
        measured = json.loads(child("inside", f"{pools} {model}"))
        idle = measured.pop("idle")
        print_times(f"one process, {pools} pool, idle", idle)
        for name, times in measured.items():
            print_times(f"one process, {pools} pool, {name}", times, idle)


async def _tokenize(server: Server, tokenizer: DeploymentHandle) -> None:
    encode = tokenizer.options(_by_reference=False).encode  # as app/fanout.py does

    async def once() -> object:
        return await encode.remote(CHAT)

    await times_of(once, 2)
    idle: list[float] = []
    print_times("idle", idle := await times_of(once, SECONDS))
    for name, size in SIZES.items():
        with preprocessing(server, size, PREPROCESSING) as done:
            before, count = Cpu.now(server.mark), done()
            times = await times_of(once, SECONDS)
            count = done() - count
            _, others = Cpu.now(server.mark).since(before)
        note = f"{count / SECONDS:5.1f} images/s, others {others:.2f} cores"
        print_times(name, times, idle, note)


@contextmanager
def preprocessing(server: Server, size: tuple[int, int], in_flight: int) -> Iterator[Callable[[], int]]:
    """Keeps `count` images in flight, from another process. Yields a call that returns the number done."""
    command = [sys.executable, "-m", "scripts.bench_isolation", "--child", "sender"]
    arguments = [argument(server.mark, "--gcs-address="), *map(str, size), str(in_flight)]
    env = {**os.environ, **dict([server.mark.split("=")])}
    with subprocess.Popen(
        [*command, " ".join(arguments)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        sender.stdout.readline()  # the first images are in flight

        def done() -> int:
            print(file=sender.stdin, flush=True)
            assert sender.stdout is not None
            return int(sender.stdout.readline())

        yield done
        sender.stdin.close()


def sender(arguments: str) -> None:
    """Runs in a process of its own: keeps images in flight, and prints the number done for each line read."""
    address, width, height, in_flight = arguments.split()
    with handles(address) as stage:
        asyncio.run(_sender(stage("MMPreprocessor"), (int(width), int(height)), int(in_flight)))


async def _sender(preprocessor: DeploymentHandle, size: tuple[int, int], in_flight: int) -> None:
    item = await photo(*size)
    async with kept_busy(partial(preprocess, preprocessor, item), in_flight) as done:
        print("in flight", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(len(done), flush=True)


CHAT = Chat([{"role": "user", "content": PROMPT}])


async def photo(width: int, height: int) -> Media:
    pixels = image.decode(jpeg(width, height), ImageLimits()).arrays["pixels"]
    return Media(Modality.IMAGE, "", pack({"pixels": pixels}), {}, 0, "image/jpeg")


async def preprocess(preprocessor: DeploymentHandle, item: Media) -> object:
    return await preprocessor.process.remote(new(item), None, TIMEOUT_S)


_numbers = itertools.count()


def new(item: Media) -> Media:
    """Returns the same pixels as an item with a digest of its own, so that no cache knows it."""
    return replace(item, digest=f"{os.getpid()}-{next(_numbers)}")


async def times_of(once: Callable[[], Awaitable[object]], seconds: float) -> list[float]:
    """Milliseconds, one call after the other."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        await once()
        times.append((time.perf_counter() - start) * 1000)
    return times


@asynccontextmanager
async def kept_busy(
    start: Callable[[], Awaitable[object]], in_flight: int = PREPROCESSING
) -> AsyncIterator[list[float]]:
    """Keeps `count` calls in flight. Yields the end times of the calls that ended inside the block."""
    done: list[float] = []

    async def worker() -> None:
        while True:
            await start()
            done.append(time.perf_counter())

    workers = [asyncio.create_task(worker()) for _ in range(in_flight)]
    await asyncio.sleep(WARM_UP_S)
    done.clear()
    yield done
    count = len(done)
    for task in workers:
        task.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    del done[count:]


def inside(argument: str) -> None:
    """Runs in a process of its own: does both kinds of work in threads of one process."""
    pools, _, model = argument.partition(" ")
    print(json.dumps(asyncio.run(_inside(pools == "own", model))))


async def _inside(own: bool, model: str) -> dict[str, list[float]]:
    encoder, processor = stages_inside(model)
    loop = asyncio.get_running_loop()
    images = ThreadPoolExecutor(2)
    prompts = ThreadPoolExecutor(1) if own else images

    async def once() -> object:
        return await loop.run_in_executor(prompts, encoder.encode, CHAT)

    def process(item: Media, arrays: Arrays) -> Awaitable[object]:
        return loop.run_in_executor(images, lambda: processor.get().process([(item, arrays)]))

    await times_of(once, 1)
    times = {"idle": await times_of(once, SECONDS / 2)}
    item = await photo(*SIZES["12 MP"])
    arrays = await unpack(item.payload)
    async with kept_busy(lambda: process(new(item), arrays)):
        times["12 MP"] = await times_of(once, SECONDS)
    return times


def stages_inside(model: str) -> tuple[Any, Any]:
    """The prompt encoder, and an item processor for each thread."""
    import torch

    from deployments.processor.chat_encoder import ChatEncoder
    from deployments.processor.checkpoint import load_processor, load_prompting
    from deployments.processor.item_processor import ItemProcessor

    torch.set_num_threads(1)

    class PerThread(threading.local):
        def get(self) -> ItemProcessor:
            if not hasattr(self, "processor"):
                self.processor = ItemProcessor(load_processor(model))
            return self.processor

    return ChatEncoder(load_prompting(model)), PerThread()


# Text and /health while requests with images are in flight


def under_load(server: Server, model: str) -> None:
    print(f"\nText over HTTP, {REQUESTS} requests with a 12 MP JPEG in flight")
    photo = Photo(*SIZES["12 MP"])
    with connection(server) as probe:
        for _ in range(20):
            first_token(probe)
        before = Cpu.now(server.mark)
        idle, health = probing(server, probe)
        resting, others = Cpu.now(server.mark).since(before)
        print_times("idle", idle, note=f"/health max {max(health):.0f} ms, others {others:.2f} cores")
        with image_requests(server, photo, REQUESTS) as done:
            before, count = Cpu.now(server.mark), len(done)
            times, health = probing(server, probe)
            _, others = Cpu.now(server.mark).since(before)
            meanwhile = len(done) - count
            note = f"/health max {max(health):.0f} ms, others {others:.2f} cores"
            print_times("under load", times, idle, note)
            before, count = Cpu.now(server.mark), len(done)
            time.sleep(SECONDS)
            alone, others = Cpu.now(server.mark).since(before)
            count = len(done) - count
    print(f"  images: {meanwhile / SECONDS:.2f} requests/s at the same time as the texts")
    print(f"          {count / SECONDS:.2f} requests/s without them, others {others:.2f} cores")
    print("  CPU time in ms    an image   a text   (images alone, texts alone)")
    image_ms = {name: seconds / count * 1000 for name, seconds in alone.items()}
    text_ms = {name: seconds / len(idle) * 1000 for name, seconds in resting.items()}
    for name, ms in [("all", sum(image_ms.values())), *sorted(image_ms.items(), key=lambda pair: -pair[1])]:
        print(f"      {name:<16} {ms:7.1f}  {text_ms.get(name, sum(text_ms.values())):7.1f}")


class Photo:
    """Bodies of requests with JPEGs, each with a comment of its own in the file."""

    def __init__(self, width: int, height: int, count: int = 1) -> None:
        data = jpeg(width, height)
        part: dict[str, object] = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,@"}}
        content = [part] * count + [{"type": "text", "text": "what is it?"}]
        request = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        self._between = json.dumps(request).encode().split(b"@")
        self._rest = base64.b64encode(data[2:])

    def body(self) -> bytes:
        start, *between = self._between
        return start + b"".join(self._file() + text for text in between)

    def _file(self) -> bytes:
        comment = b"\xff\xd8\xff\xfe\x00\x0b" + b"%09d" % next(_numbers)
        return base64.b64encode(comment) + self._rest


@contextmanager
def connection(server: Server) -> Iterator[http.client.HTTPConnection]:
    target = urlsplit(server.url)
    with contextlib.closing(http.client.HTTPConnection(target.hostname or "", target.port)) as opened:
        yield opened


COMPLETIONS = "/v1/chat/completions"


def first_token(probe: http.client.HTTPConnection) -> float:
    """Milliseconds from a text to the first event of its answer, which comes with the first token."""
    content = f"hello {next(_numbers)}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "stream": True}
    start = time.perf_counter()
    probe.request("POST", COMPLETIONS, json.dumps(body))
    response = probe.getresponse()
    response.readline()
    ms = (time.perf_counter() - start) * 1000
    assert response.status == 200, response.read()
    response.read()
    return ms


def probing(server: Server, probe: http.client.HTTPConnection) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token, with a pause after each text, and of /health, 20 times a second."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        health = pool.submit(_health, server, over)
        end = time.perf_counter() + SECONDS
        times = []
        while time.perf_counter() < end:
            times.append(first_token(probe))
            time.sleep(PAUSE_S)
        over.set()
        return times, health.result()


def _health(server: Server, over: threading.Event) -> list[float]:
    times = []
    with connection(server) as probe:
        while not over.wait(0.05):
            start = time.perf_counter()
            probe.request("GET", "/health")
            probe.getresponse().read()
            times.append((time.perf_counter() - start) * 1000)
    return times


@contextmanager
def image_requests(server: Server, photo: Photo, in_flight: int) -> Iterator[list[float]]:
    """Requests one after the other on each connection; gives the milliseconds of those that are done."""
    done: list[float] = []
    over = threading.Event()

    def client() -> None:
        with connection(server) as own:
            while not over.is_set():
                done.append(completion(own, photo.body()))

    with ThreadPoolExecutor(in_flight) as pool:
        clients: list[Future[None]] = [pool.submit(client) for _ in range(in_flight)]
        while len(done) < 2 * in_flight and not any(future.done() for future in clients):
            time.sleep(0.05)
        yield done
        over.set()
        for future in clients:
            future.result()


def completion(
    own: http.client.HTTPConnection,
    body: bytes,
    path: str = COMPLETIONS,
    request_id: str = "",
) -> float:
    """Milliseconds to the whole answer."""
    start = time.perf_counter()
    own.request("POST", path, body, {"x-request-id": request_id} if request_id else {})
    response = own.getresponse()
    answer = response.read()
    assert response.status == 200, answer
    return (time.perf_counter() - start) * 1000


# Preprocessing by one replica and by two


def replicas(model: str) -> None:
    print("\n12 MP images through MMPreprocessor")
    bare = json.loads(child("bare", model))
    print(f"  transformers' processor in a loop  {bare['plain']:6.2f} images/s")
    print(f"  the same by ItemProcessor          {bare['ours']:6.2f} images/s")
    rates: list[float] = []
    for count in (1, 2):
        with running(model, count) as server:
            with preprocessing(server, SIZES["12 MP"], PREPROCESSING * count) as done:
                before, finished = Cpu.now(server.mark), done()
                time.sleep(SECONDS)
                rates.append((done() - finished) / SECONDS)
                _, others = Cpu.now(server.mark).since(before)
            print(
                f"  {count} replica(s)                       {rates[-1]:6.2f} images/s   "
                f"{rates[-1] / rates[0]:4.2f} x one, {rates[-1] / bare['plain']:4.2f} x the processor, "
                f"{rates[-1] / bare['ours']:4.2f} x ItemProcessor   (others {others:.2f} cores)",
                flush=True,
            )
            if count == 2:
                twenty(server)


def twenty(server: Server) -> None:
    """Sends one request with 20 images: which replicas process them, and how another single image fares."""
    one, many = Photo(*SIZES["12 MP"]), Photo(*SIZES["12 MP"], count=MANY)
    with connection(server) as own, connection(server) as other, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            rendering(own, one.body(), "warm")
        alone = rendering(own, one.body(), "alone")
        busy = pool.submit(rendering, other, many.body(), "many")
        while not (sum(_by_replica(server, "many")) or busy.done()):
            time.sleep(0.02)
        meanwhile = rendering(own, one.body(), "beside")
        done = sum(_by_replica(server, "many"))
        whole = busy.result()
    print(
        f"  one request with {MANY} images: {whole:.0f} ms, by replica {_by_replica(server, 'many')} of them"
    )
    print(
        f"  another's single image: {alone:.0f} ms alone, {meanwhile:.0f} ms meanwhile"
        f" (when it was answered, {done} of the {MANY} were done)",
        flush=True,
    )


def rendering(own: http.client.HTTPConnection, body: bytes, request_id: str) -> float:
    return completion(own, body, f"{COMPLETIONS}/render", request_id)


def _by_replica(server: Server, request_id: str) -> list[int]:
    """Returns the number of items of a request that each preprocessor has processed."""
    files = (server.logs / "serve").glob("replica_headrace_MMPreprocessor_*.log")
    lines = [file.read_text().splitlines() for file in files]
    return [sum("preprocessed" in line and request_id in line for line in each) for each in lines]


def bare(model: str) -> None:
    """Runs in a process of its own: images a second, by the processor of transformers and by ours."""
    from deployments.processor.checkpoint import load_processor

    _, processors = stages_inside(model)
    processor, ours = load_processor(model), processors.get()
    item = asyncio.run(photo(*SIZES["12 MP"]))
    arrays = asyncio.run(unpack(item.payload))
    picture = arrays["pixels"]

    def plain() -> object:
        return processor(images=[picture], text=["<|image_pad|>"], return_tensors="pt")

    rates = {"plain": _per_second(plain), "ours": _per_second(lambda: ours.process([(item, arrays)]))}
    print(json.dumps(rates))


def _per_second(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + SECONDS / 2:
        work()
        count += 1
    return count / (time.perf_counter() - start)


# One request against the same work in a row


def latency(server: Server, model: str) -> None:
    print(
        f"\nOne request with an image, against the same work in a row in one process (median of {LATENCY_N})"
    )
    command = [sys.executable, "-m", "scripts.bench_isolation", "--child", "row", model]
    with (
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as row,
        connection(server) as own,
    ):
        assert row.stdin is not None
        assert row.stdout is not None
        for name, size in {"224 px": (224, 224), "12 MP": SIZES["12 MP"]}.items():
            photo = Photo(*size)
            graph, alone = [], []
            before = Cpu.now(server.mark)
            for _ in range(LATENCY_N + 5):
                graph.append(completion(own, photo.body()))
                body = photo.body()
                row.stdin.write(len(body).to_bytes(8, "little") + body)
                row.stdin.flush()
                alone.append(float(row.stdout.readline()))
            _, others = Cpu.now(server.mark).since(before)
            through, direct = statistics.median(graph[5:]), statistics.median(alone[5:])
            print(
                f"  {name:<8} graph {through:7.2f} ms, in a row {direct:7.2f} ms: {through - direct:+7.2f} ms"
                f"   (others at most {others:.2f} cores)",
                flush=True,
            )
        row.stdin.close()


def in_a_row(model: str) -> None:
    """Runs in a process of its own: reads bodies from stdin, prints milliseconds."""
    import torch

    from deployments.processor.checkpoint import load_model

    encoder, processors = stages_inside(model)
    processor, loaded = processors.get(), load_model(model, "cpu", "auto")
    while length := int.from_bytes(sys.stdin.buffer.read(8), "little"):
        body = sys.stdin.buffer.read(length)
        start = time.perf_counter()
        with torch.inference_mode():
            answer_in_a_row(body, encoder, processor, loaded)
        print((time.perf_counter() - start) * 1000, flush=True)


def answer_in_a_row(body: bytes, encoder: Any, processor: Any, model: Any) -> Any:
    from deployments.engine.base import EngineItem
    from deployments.engine.inputs import assemble
    from deployments.processor.placeholders import run_lengths
    from deployments.types import MMFeatures

    (message,) = json.loads(body)["messages"]
    part, text = message["content"]
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    pixels = image.decode(data, ImageLimits()).arrays
    media = Media(Modality.IMAGE, "")
    (done,) = processor.process([(media, pixels)])
    prompt = encoder.encode(Chat([{"role": "user", "content": [{"type": "image"}, text]}]))
    features = MMFeatures(Modality.IMAGE, "", done.num_tokens, run_lengths(done.token_ids), None, {})
    accepts = {"input_ids", "attention_mask", "mm_token_type_ids", *done.features}
    inputs = assemble(prompt, [EngineItem(features, done.features)], accepts, model.dtype)
    return model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)


def child(name: str, argument: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "scripts.bench_isolation", "--child", name, argument]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


CHILDREN: dict[str, Callable[[str], None]] = {
    "sender": sender,
    "inside": inside,
    "bare": bare,
    "row": in_a_row,
}
ON_ONE_SERVER: dict[str, Callable[[Server, str], None]] = {
    "tokenize": tokenize,
    "http": under_load,
    "latency": latency,
}
PARTS = (*ON_ONE_SERVER, "replicas")


if __name__ == "__main__":
    main()
