"""The stage as the graph uses it, without Ray: decoding, fetching, sharing, cancelling."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import gzip
import io
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from aiohttp import web
from PIL import Image
from pydantic import ValidationError

from deployments.errors import FetchRefused, InvalidMedia, MediaTooLarge, ServingError, StageTimeout
from deployments.media import image
from deployments.media.urls import UrlPolicy
from deployments.runtime import pool
from deployments.runtime.payload import pack_pieces, unpack
from deployments.runtime.single_flight import SingleFlight
from deployments.stages.media_loader import MediaLoader, MediaLoaderConfig
from deployments.types import CallHeader, Media, MediaOptions, MediaSource, Modality
from tests.support.in_process import Direct
from tests.support.media_files import clip
from tests.support.media_hosts import SilentHost, answer, raw_serving, serving
from tests.support.paths import ROOT

OPTIONS = MediaOptions()


def png(size: tuple[int, int] = (4, 3), colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def wav(num_samples: int = 8000, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(num_samples, 0.5), rate, format="WAV")
    return file.getvalue()


@asynccontextmanager
async def loading(timeout_s: float = 30, **config: Any) -> AsyncIterator[Direct[MediaLoader]]:
    with warnings.catch_warnings():  # the loader silences Pillow for its whole process
        loader = MediaLoader(
            MediaLoaderConfig(allowed_private_networks=["127.0.0.0/8"], niceness=0, **config)
        )
        try:
            yield Direct(loader, timeout_s)
        finally:
            await loader.close()


async def data(modality: Modality, content: bytes, header: str = "x/y;base64") -> MediaSource:
    payload = await pack_pieces([base64.b64encode(content)])
    return MediaSource(modality, "data", header=header, payloads=[payload])


def url(modality: Modality, where: str) -> MediaSource:
    return MediaSource(modality, "url", url=where)


async def test_an_image_by_data_uri() -> None:
    content = png()
    async with loading() as loader:
        media = await loader.load(await data(Modality.IMAGE, content), OPTIONS)
    assert (await unpack(media.payload))["pixels"].tolist() == [[[255, 0, 0]] * 4] * 3
    assert media.info == {"width": 4, "height": 3, "original_width": 4, "original_height": 3}
    assert (media.modality, media.mime, media.num_bytes) == (Modality.IMAGE, "image/png", len(content))
    assert not media.cached


async def test_audio_is_resampled_to_what_the_processor_asks_for() -> None:
    async with loading() as loader:
        source = await data(Modality.AUDIO, wav())
        media = await loader.load(source, MediaOptions(sampling_rate=24000))
    assert (await unpack(media.payload))["samples"].shape == (24000,)
    assert media.info["num_samples"] == 24000
    assert media.info["duration_s"] == 1.0


async def test_video_is_sampled_as_the_processor_asks_for() -> None:
    async with loading() as loader:
        source = await data(Modality.VIDEO, clip(list(range(30))))
        media = await loader.load(source, MediaOptions(num_frames=3))
    assert (await unpack(media.payload))["frames"].shape == (3, 48, 96, 3)
    assert media.info["frame_indices"] == [0, 14, 29]
    assert media.video_metadata is not None
    assert media.video_metadata["frames_indices"] == [0, 14, 29]


async def test_the_same_bytes_by_url_are_the_same_item() -> None:
    content = png()
    async with serving(answer(content, content_type="text/plain")) as host, loading() as loader:
        fetched = await loader.load(url(Modality.IMAGE, host.url()), OPTIONS)
        sent = await loader.load(await data(Modality.IMAGE, content), OPTIONS)
    assert fetched.digest == sent.digest
    assert fetched.mime == "image/png"
    assert fetched.num_bytes == len(content)


async def test_the_digest_knows_what_shaped_the_arrays_and_no_more() -> None:
    async with loading() as loader:
        image_source = await data(Modality.IMAGE, png())
        audio_source = await data(Modality.AUDIO, wav())

        async def name(source: MediaSource, options: MediaOptions) -> str:
            return str((await loader.load(source, options)).digest)

        slow, fast = MediaOptions(sampling_rate=8000), MediaOptions(sampling_rate=16000)
        assert await name(image_source, slow) == await name(image_source, fast)
        assert await name(audio_source, slow) != await name(audio_source, fast)
        other = await data(Modality.IMAGE, png(colour=(255, 0, 1)))
        assert await name(image_source, slow) != await name(other, slow)


async def test_files_below_the_allowed_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    source = url(Modality.IMAGE, f"file://{tmp_path}/a.png")
    async with loading(allowed_local_media_path=str(tmp_path)) as loader:
        assert (await loader.load(source, OPTIONS)).mime == "image/png"
    async with loading(allowed_local_media_path=str(tmp_path), max_image_bytes=10) as loader:
        with pytest.raises(MediaTooLarge, match="larger than the limit of 10 bytes"):
            await loader.load(source, OPTIONS)
    async with loading() as loader:
        with pytest.raises(FetchRefused, match="file: URLs are off"):
            await loader.load(source, OPTIONS)


async def test_limits_of_the_config_reach_the_decoders() -> None:
    async with loading(
        max_image_pixels=11, max_audio_seconds=0.5, max_video_frames=9, max_image_bytes=10_000
    ) as loader:
        for modality, content, message in (
            (Modality.IMAGE, png(), "limit of 11 pixels"),
            (Modality.IMAGE, bytes(10_001), "limit of 10000 bytes"),
            (Modality.AUDIO, wav(), r"limit of 0\.5 s"),
            (Modality.VIDEO, clip(list(range(10))), "limit of 9 frames"),
        ):
            with pytest.raises(MediaTooLarge, match=message):
                await loader.load(await data(modality, content), OPTIONS)


async def test_undecodable_bytes_from_a_host_that_says_200() -> None:
    async with serving(answer(b"<html>please log in</html>")) as host, loading() as loader:
        with pytest.raises(InvalidMedia, match="It is an HTML page"):
            await loader.load(url(Modality.IMAGE, host.url()), OPTIONS)


async def test_a_passed_deadline_names_the_stage() -> None:
    async with loading(timeout_s=0.0) as loader:
        with pytest.raises(StageTimeout, match="deadline passed in MediaLoader"):
            await loader.load(await data(Modality.IMAGE, png()), OPTIONS)


class Gate:
    """A host that holds its answers back until the test releases them."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.arrived, self.go, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(self, request: web.Request) -> web.StreamResponse:
        self.arrived.set()
        await self.go.wait()
        return web.Response(body=self.body)


async def test_requests_for_one_url_share_one_fetch() -> None:
    gate = Gate(png())
    async with serving(gate.handler) as host, loading() as loader:
        source = url(Modality.IMAGE, host.url())
        tasks = [asyncio.create_task(loader.load(source, OPTIONS)) for _ in range(20)]
        await gate.arrived.wait()
        gate.go.set()
        loaded = await asyncio.gather(*tasks)
        assert len(host.requests) == 1
        assert len({media.digest for media in loaded}) == 1
        await loader.load(source, OPTIONS)  # nothing said that it may be kept
        assert len(host.requests) == 2


async def test_different_options_do_not_share() -> None:
    async with serving(answer(wav())) as host, loading() as loader:
        source = url(Modality.AUDIO, host.url())
        first, second = await asyncio.gather(
            loader.load(source, MediaOptions(sampling_rate=8000)),
            loader.load(source, MediaOptions(sampling_rate=16000)),
        )
    assert (first.info["num_samples"], second.info["num_samples"]) == (8000, 16000)


async def test_one_who_leaves_does_not_take_the_others_along() -> None:
    gate = Gate(png())
    async with serving(gate.handler) as host, loading() as loader:
        source = url(Modality.IMAGE, host.url())
        tasks = [asyncio.create_task(loader.load(source, OPTIONS)) for _ in range(3)]
        await gate.arrived.wait()
        with pytest.raises(StageTimeout):
            await Direct(loader.stage, timeout_s=0.01).load(source, OPTIONS)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        gate.go.set()
        assert [media.mime for media in await asyncio.gather(*tasks[1:])] == ["image/png"] * 2
        assert len(host.requests) == 1


async def test_the_fetch_stops_when_the_last_waiter_leaves() -> None:
    host = SilentHost()
    async with raw_serving(host.talk) as (port, _), loading() as loader:
        source = url(Modality.IMAGE, f"http://127.0.0.1:{port}/")
        tasks = [asyncio.create_task(loader.load(source, OPTIONS)) for _ in range(2)]
        await host.arrived.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(host.gone.wait(), 5)


async def test_cancelling_tells_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    running, seen = threading.Event(), threading.Event()

    def decode(data: bytes, limits: Any, cancelled: threading.Event, *_: Any) -> Any:
        running.set()
        assert cancelled.wait(10)
        seen.set()

    monkeypatch.setattr(image, "decode", decode)
    async with loading() as loader:
        task = asyncio.create_task(loader.load(await data(Modality.IMAGE, png()), OPTIONS))
        assert await asyncio.to_thread(running.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(seen.wait, 10)


async def test_decoding_does_not_hold_the_loop_and_waiting_is_not_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = image.decode
    names: list[str] = []
    running, go = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        names.append(threading.current_thread().name)
        running.set()
        assert go.wait(10)
        return decode(*args)

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pool, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(image, "decode", slow)
    async with loading(threads=1) as loader:
        sources = [await data(Modality.IMAGE, png((8, 8), (number, 0, 0))) for number in range(2)]
        loads = [loader.stage.load(CallHeader(), source, OPTIONS) for source in sources]
        tasks = [asyncio.ensure_future(load) for load in loads]
        assert await asyncio.to_thread(running.wait, 10)  # the loop runs while the only thread is busy
        clock.now = 0.2  # the first load holds the thread, and the second waits for it
        go.set()
        times = [(await task).service_ms for task in tasks]
    assert all(name.startswith("work") for name in names)
    assert times == pytest.approx([200.0, 0.0])


async def test_one_line_per_item_without_its_content(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "ray.serve"):
            async with loading() as loader:
                await loader.load(await data(Modality.IMAGE, png()), OPTIONS)
    finally:
        logger.removeHandler(caplog.handler)
    lines = {record.getMessage() for record in caplog.records if record.name == "ray.serve"}
    assert len(lines) == 1
    assert lines.pop().startswith(f"loaded image: {len(png())} bytes of image/png in ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_image_pixel": 5}, "max_image_pixel"),
        ({"max_image_pixels": 200_000_000}, "max_image_pixels"),
        ({"allowed_private_networks": ["10.0.0.0/40"]}, "does not appear to be an IPv4 or IPv6 network"),
        ({"threads": 0}, "threads"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused_at_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MediaLoaderConfig(**settings)


def test_a_folder_that_is_not_there_is_refused_at_start() -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match="allowed_local_media_path is not a folder"),
    ):
        MediaLoader(MediaLoaderConfig(allowed_local_media_path="no/such/folder"))


def test_starting_loads_neither_torch_nor_transformers() -> None:
    script = "import sys, deployments.stages.media_loader; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(out.stdout.split())


async def test_a_shared_failure_is_an_error_of_its_own_for_each() -> None:
    """The pipeline writes the item's name into the error that it gets."""
    flights: SingleFlight[Media] = SingleFlight()

    async def fail() -> Media:
        raise InvalidMedia("broken")

    first, second = await asyncio.gather(
        *(flights.run("key", fail) for _ in range(2)), return_exceptions=True
    )
    assert isinstance(first, ServingError)
    assert isinstance(second, ServingError)
    first.param = "messages[0].content[0]"
    assert second.param is None
    assert second.message == "broken"


async def test_a_flight_that_ended_is_not_joined() -> None:
    flights: SingleFlight[int] = SingleFlight()
    numbers = iter(range(10))

    async def work() -> int:
        return next(numbers)

    assert [await flights.run("key", work) for _ in range(3)] == [0, 1, 2]
    assert await asyncio.gather(*(flights.run(key, work) for key in "aabb")) == [3, 3, 4, 4]


class Site:
    """A host whose answers may be kept as `headers` say; it answers 304 to the ETag among them."""

    def __init__(self, body: bytes, **headers: str) -> None:
        self.body = body
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    async def handler(self, request: web.Request) -> web.StreamResponse:
        tag = self.headers.get("ETag")
        if tag and request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=self.headers)
        return web.Response(body=self.body, headers=self.headers)


async def cached(loader: Direct[MediaLoader], where: str, times: int = 2) -> list[bool]:
    return [(await loader.load(url(Modality.IMAGE, where), OPTIONS)).cached for _ in range(times)]


async def test_what_is_fresh_is_not_fetched_again() -> None:
    site = Site(png(), Cache_Control="max-age=600")
    async with serving(site.handler) as host, loading() as loader:
        source = url(Modality.IMAGE, host.url())
        first = await loader.load(source, OPTIONS)
        other = MediaOptions(background=(0, 0, 0))  # what is kept is what was sent, not the pixels
        second = await loader.load(url(Modality.IMAGE, host.url() + "#fragment"), other)
        assert len(host.requests) == 1
    assert (first.cached, second.cached) == (False, True)
    assert second.num_bytes == len(png())
    pixels = (await unpack(second.payload))["pixels"]
    assert pixels.tolist() == (await unpack(first.payload))["pixels"].tolist()


async def test_what_is_stale_is_asked_for_with_its_etag() -> None:
    site = Site(png(), ETag='"1"', Cache_Control="no-cache")
    async with serving(site.handler) as host, loading() as loader:
        assert await cached(loader, host.url(), 3) == [False, True, True]
        asked = [request.headers.get("If-None-Match") for request in host.requests]
        assert asked == [None, '"1"', '"1"']
        site.body, site.headers["ETag"] = png((5, 5)), '"2"'
        assert await cached(loader, host.url(), 2) == [False, True]


@pytest.mark.parametrize(
    "headers", [{"Cache_Control": "no-store", "ETag": '"1"'}, {}], ids=["no-store", "none"]
)
async def test_what_may_not_be_kept_is_fetched_each_time(headers: dict[str, str]) -> None:
    async with serving(Site(png(), **headers).handler) as host, loading() as loader:
        assert await cached(loader, host.url()) == [False, False]
        assert len(host.requests) == 2
        assert "If-None-Match" not in host.requests[1].headers


async def test_without_bytes_there_is_no_cache() -> None:
    site = Site(png(), Cache_Control="max-age=600")
    async with serving(site.handler) as host, loading(cache_bytes=0) as loader:
        assert await cached(loader, host.url()) == [False, False]


async def test_what_cannot_be_decoded_is_not_kept() -> None:
    site = Site(b"<html>busy</html>", Cache_Control="max-age=600", ETag='"1"')
    async with serving(site.handler) as host, loading() as loader:
        with pytest.raises(InvalidMedia):
            await loader.load(url(Modality.IMAGE, host.url()), OPTIONS)
        site.body = png()
        assert await cached(loader, host.url()) == [False, True]


async def test_what_a_redirect_led_to_is_not_kept() -> None:
    site = Site(png(), Cache_Control="max-age=600")

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.raw_path == "/here":
            return web.Response(status=301, headers={"Location": "/there"})
        return await site.handler(request)

    async with serving(handler) as host, loading() as loader:
        assert await cached(loader, host.url("/here")) == [False, False]


async def test_the_least_used_goes_when_the_bytes_are_full() -> None:
    site = Site(png(), Cache_Control="max-age=600")
    num_bytes = 4 * (len(png()) + 100)  # four entries with their URLs and headers, not five
    async with serving(site.handler) as host, loading(cache_bytes=num_bytes) as loader:
        for path in "abcdefgh":
            await cached(loader, host.url(f"/{path}"), 1)
        assert await cached(loader, host.url("/h"), 1) == [True]
        assert await cached(loader, host.url("/a"), 1) == [False]


async def test_a_kept_body_meets_the_limit_of_the_modality() -> None:
    site = Site(png(), Cache_Control="max-age=600")
    async with serving(site.handler) as host, loading(max_audio_bytes=10) as loader:
        await cached(loader, host.url(), 1)
        with pytest.raises(MediaTooLarge, match="larger than the limit of 10 bytes"):
            await loader.load(url(Modality.AUDIO, host.url()), OPTIONS)
        assert len(host.requests) == 1


async def test_a_compressed_body_is_kept_decompressed() -> None:
    site = Site(gzip.compress(png()), Cache_Control="max-age=600", Content_Encoding="gzip")
    async with serving(site.handler) as host, loading() as loader:
        assert await cached(loader, host.url()) == [False, True]


async def test_a_fresh_body_is_no_way_around_the_policy() -> None:
    site = Site(png(), Cache_Control="max-age=600")
    async with serving(site.handler) as host, loading() as loader:
        await cached(loader, host.url(), 1)
        loader.stage._policy = UrlPolicy()
        with pytest.raises(FetchRefused, match="a loopback address"):
            await cached(loader, host.url(), 1)


async def test_what_was_decoded_before_comes_without_its_arrays_where_they_are_not_wanted() -> None:
    source = await data(Modality.IMAGE, png())
    known_will_do = replace(OPTIONS, decode_again=False)
    async with loading() as loader:
        first = await loader.load(source, known_will_do)
        again = await loader.load(source, known_will_do)
        wanted = await loader.load(source, OPTIONS)
        other = await loader.load(source, replace(known_will_do, background=(0, 0, 0)))
        shown = await loader.load(source, replace(known_will_do, previews=True))
    assert again.payload is None
    assert (again.digest, again.info, again.mime) == (first.digest, first.info, first.mime)
    assert not any(media.payload is None for media in (first, wanted, other, shown))
    assert shown.previews


async def test_equal_content_in_flight_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    callers, joined, decoded = 8, 0, 0
    all_joined = threading.Event()
    run, decode = SingleFlight.run, image.decode

    async def joining(*args: Any) -> Any:
        nonlocal joined
        joined += 1
        if joined == callers:
            all_joined.set()
        return await run(*args)

    def held(*args: Any) -> Any:
        nonlocal decoded
        decoded += 1
        all_joined.wait(10)
        return decode(*args)

    monkeypatch.setattr(SingleFlight, "run", joining)
    monkeypatch.setattr(image, "decode", held)
    source = await data(Modality.IMAGE, png())
    async with loading() as loader:
        loaded = await asyncio.gather(*(loader.load(source, OPTIONS) for _ in range(callers)))
    assert decoded == 1
    assert len({media.digest for media in loaded}) == 1


async def test_work_that_fails_as_its_last_waiter_leaves_prints_no_traceback() -> None:
    flights: SingleFlight[None] = SingleFlight()
    begun, release, reported = asyncio.Event(), asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def fails() -> None:
        begun.set()
        await release.wait()
        raise InvalidMedia("broken")

    waiter = asyncio.create_task(flights.run("key", fails))
    await begun.wait()
    release.set()
    await asyncio.sleep(0)  # the work fails in the turn in which the waiter is cancelled
    waiter.cancel()
    with contextlib.suppress(asyncio.CancelledError, InvalidMedia):
        await waiter
    del waiter
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert not reported
