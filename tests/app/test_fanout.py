"""The fan-out over the real stages in this process, with one of them replaced if a fault is needed."""

from __future__ import annotations

import asyncio
import base64
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from app.config import AppConfig
from app.fanout import FanOut, Prepared, _sample, gather_or_cancel
from app.intake.long_string import LongString
from app.intake.precedence import Precedence
from app.openai.parse_chat import Item, ParsedChat
from app.stages import CallContext, Deadline, Stages, Timed
from deployments.errors import (
    ArraysEvicted,
    InvalidMedia,
    MediaTooLarge,
    ObjectLost,
    ReplicaDied,
    ServingError,
)
from deployments.processor.settings import ProcessorSettings
from deployments.stages.embedding_loader import EmbeddingLoader
from deployments.stages.media_loader import MediaLoader, MediaLoaderConfig
from deployments.stages.mm_preprocessor import MMPreprocessor
from deployments.stages.model import Model
from deployments.stages.tokenizer import Tokenizer
from deployments.types import (
    Chat,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    MMFeatures,
    MMItem,
    Modality,
    SamplingParams,
)
from tests.support.in_process import InProcessMediaLoader, InProcessMMPreprocessor, in_process

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


class Parts:
    """The stages themselves, so that a test can wrap one of them."""

    def __init__(self, config: AppConfig) -> None:
        self.tokenizer = Tokenizer(config.tokenizer)
        self.media_loader = MediaLoader(config.media_loader)
        self.embedding_loader = EmbeddingLoader(config.embedding_loader)
        self.mm_preprocessor = MMPreprocessor(config.mm_preprocessor, config.media_loader.decoder)
        self.model = Model(config.engine)

    async def stages(self) -> Stages:
        return await in_process(
            self.tokenizer, self.media_loader, self.embedding_loader, self.mm_preprocessor, self.model
        )


@pytest.fixture(scope="module")
def parts() -> Parts:
    with warnings.catch_warnings():  # the stages change the filters of their process
        return Parts(AppConfig())


@pytest.fixture
async def stages(parts: Parts) -> Stages:
    return await parts.stages()


def parsed(*shades: int) -> ParsedChat:
    """One image for each shade, as a tiny BMP, percent-encoded."""
    items = []
    for i, shade in enumerate(shades):
        header = (
            "424d3a0000000000000036000000280000000100000001000000010018000000000004000000130b0000130b0000"
        )
        bmp = bytes.fromhex(header + "00" * 8 + f"{shade:02x}" * 3 + "00")
        data = "".join(f"%{byte:02x}" for byte in bmp).encode()
        items.append(Item(f"messages[0].content[{i}]", Modality.IMAGE, "data", header="image/bmp", data=data))
    content = [{"type": "image"} for _ in items]
    return ParsedChat(Chat([{"role": "user", "content": content}]), items)


def heard(*pitches: int, seconds: float = 1.0) -> ParsedChat:
    """One sound for each pitch in Hz: of a second, it is too much to be decoded where it is processed."""
    items = []
    for i, pitch in enumerate(pitches):
        file = io.BytesIO()
        soundfile.write(
            file, np.sin(np.arange(16000 * seconds) * 2 * np.pi * pitch / 16000), 16000, format="wav"
        )
        data = base64.b64encode(file.getvalue())
        param = f"messages[0].content[{i}]"
        items.append(Item(param, Modality.AUDIO, "data", header="audio/wav;base64", data=data))
    content = [{"type": "audio"} for _ in items]
    return ParsedChat(Chat([{"role": "user", "content": content}]), items)


class DyingLoader(InProcessMediaLoader):
    """A loader of which the first calls end with their replica; notes the attempt of each call."""

    def __init__(self, stage: MediaLoader, times: int) -> None:
        super().__init__(stage)
        self._times = times
        self.attempts: list[int] = []

    async def load(self, source: MediaSource, options: MediaOptions, context: CallContext) -> Timed[Media]:
        self.attempts.append(context.attempt)
        if self._times:
            self._times -= 1
            raise ReplicaDied("gone")
        return await super().load(source, options, context)


class CountingLoader(InProcessMediaLoader):
    """Holds its calls until 32 are open, and notes how many were open at each."""

    def __init__(self, stage: MediaLoader) -> None:
        super().__init__(stage)
        self.counts: list[int] = []
        self._open = 0
        self._full = asyncio.Event()

    async def load(self, source: MediaSource, options: MediaOptions, context: CallContext) -> Timed[Media]:
        self._open += 1
        self.counts.append(self._open)
        if self._open == 32:
            self._full.set()
        await self._full.wait()
        try:
            return await super().load(source, options, context)
        finally:
            self._open -= 1


class ForgetfulPreprocessor(InProcessMMPreprocessor):
    """A preprocessor whose first calls fail because the arrays are not available."""

    def __init__(self, stage: MMPreprocessor, error: ServingError, times: int) -> None:
        super().__init__(stage)
        self._error = error
        self._times = times

    async def process(
        self, items: list[Media], settings: ProcessorSettings, context: CallContext
    ) -> Timed[list[MMFeatures]]:
        if self._times:
            self._times -= 1
            raise self._error
        return await super().process(items, settings, context)


class DyingPreprocessor(InProcessMMPreprocessor):
    """A preprocessor that each item kills if it is decoded there."""

    async def read(
        self,
        source: MediaSource,
        options: MediaOptions,
        settings: ProcessorSettings,
        uuid: MediaUUID | None,
        context: CallContext,
    ) -> Timed[MMItem]:
        raise ReplicaDied("gone")


class RecordingPrecedence(Precedence):
    def __init__(self, held: list[str]) -> None:
        super().__init__()
        self._held = held

    @contextmanager
    def hold_priority(self) -> Iterator[None]:
        self._held.append("held")
        with super().hold_priority():
            yield
        self._held.append("released")


async def prepare(stages: Stages, chat: ParsedChat, max_media_bytes: int = 2**20) -> Prepared:
    fan_out = FanOut(stages)
    return await fan_out.prepare(chat, fan_out.media_options, Deadline(30), max_media_bytes)


async def test_results_keep_the_order_of_the_arguments() -> None:
    gates = [asyncio.Event() for _ in range(4)]

    async def item(i: int) -> int:
        await gates[i].wait()
        if i:
            gates[i - 1].set()  # the last finishes first
        return i

    gates[3].set()
    assert await gather_or_cancel(item(i) for i in range(4)) == [0, 1, 2, 3]


async def test_a_failure_cancels_the_siblings_and_waits_for_them() -> None:
    log, started = [], asyncio.Event()

    async def slow() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # settling takes a moment, and is waited for
            log.append("settled")

    async def fails() -> None:
        await started.wait()
        raise InvalidMedia("broken")

    with pytest.raises(InvalidMedia, match="broken"):
        await gather_or_cancel([slow(), fails()])
    assert log == ["settled"]


async def test_the_earliest_failure_by_input_order_is_raised() -> None:
    second_failed = asyncio.Event()

    async def first() -> None:
        try:
            await second_failed.wait()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise InvalidMedia("first") from None  # a failure that only shows when it is settled

    async def second() -> None:
        second_failed.set()
        raise InvalidMedia("second")

    with pytest.raises(InvalidMedia, match="first"):
        await gather_or_cancel([first(), second()])


async def test_cancelling_the_fan_out_cancels_all_and_stays_a_cancellation() -> None:
    cancelled, started = [], asyncio.Barrier(4)

    async def item(i: int) -> None:
        try:
            await started.wait()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(i)
            raise

    task = asyncio.create_task(gather_or_cancel(item(i) for i in range(3)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == [0, 1, 2]


async def test_a_failure_while_settling_does_not_replace_the_callers_cancellation() -> None:
    started = asyncio.Event()

    async def fails_when_cancelled() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise InvalidMedia("broken") from None

    task = asyncio.create_task(gather_or_cancel([fails_when_cancelled()]))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_features_come_back_in_the_order_of_the_items(stages: Stages) -> None:
    prepared = await prepare(stages, parsed(0, 255, 0))
    digests = [features.digest for features in prepared.features]
    assert digests[0] == digests[2] != digests[1]
    assert np.all(np.diff([span.offset for span in prepared.spans]) > 0)


async def test_a_request_has_at_most_32_items_in_flight(parts: Parts, stages: Stages) -> None:
    loader = CountingLoader(parts.media_loader)
    await prepare(replace(stages, media_loader=loader), heard(*range(400, 440)), 2**22)
    assert len(loader.counts) == 40
    assert max(loader.counts) == 32


async def test_a_text_holds_priority_until_its_first_token_and_media_never_do(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    fan_out = FanOut(stages)
    held: list[str] = []
    monkeypatch.setattr(fan_out, "precedence", RecordingPrecedence(held))
    for chat, expected in (
        (parsed(11), []),
        (ParsedChat(Chat([{"role": "user", "content": "hi"}]), []), ["held", "released"] * 2),
    ):
        prepared = await fan_out.prepare(chat, fan_out.media_options, Deadline(30), 2**20)
        deltas = fan_out.generate(prepared, SamplingParams(max_tokens=2), "key", Deadline(30))
        await anext(deltas)
        assert held == expected  # released before the second token
        await deltas.aclose()


async def test_an_image_or_a_short_sound_in_the_request_needs_no_loader(parts: Parts, stages: Stages) -> None:
    loader = DyingLoader(parts.media_loader, 2)
    for chat in (parsed(8), heard(730, seconds=0.5)):
        (item,) = (await prepare(replace(stages, media_loader=loader), chat)).items
        assert item.features.num_tokens > 0
        assert list(item.timings) == ["MMPreprocessor"]
        assert item.timings["MMPreprocessor"].service > 0
    assert loader.attempts == []


async def test_a_longer_sound_goes_through_the_loader(stages: Stages) -> None:
    (item,) = (await prepare(stages, heard(731))).items
    assert list(item.timings) == ["MediaLoader", "MMPreprocessor"]
    assert all(timing.service > 0 for timing in item.timings.values())


async def test_an_image_that_kills_a_preprocessor_goes_to_the_loader_as_a_second_attempt(
    parts: Parts, stages: Stages
) -> None:
    loader = DyingLoader(parts.media_loader, 0)
    dying = replace(stages, media_loader=loader, mm_preprocessor=DyingPreprocessor(parts.mm_preprocessor))
    (item,) = (await prepare(dying, parsed(9))).items
    assert item.media is not None
    assert item.media.info["width"] == 1
    assert loader.attempts == [2]


@pytest.mark.parametrize("error", [ObjectLost("lost"), ArraysEvicted("evicted")])
async def test_arrays_that_are_not_available_are_loaded_again_once(
    error: ServingError, parts: Parts, stages: Stages
) -> None:
    once = ForgetfulPreprocessor(parts.mm_preprocessor, error, 1)
    prepared = await prepare(replace(stages, mm_preprocessor=once), heard(720))
    assert prepared.items[0].features.num_tokens > 0
    twice = ForgetfulPreprocessor(parts.mm_preprocessor, error, 2)
    with pytest.raises(type(error)):
        await prepare(replace(stages, mm_preprocessor=twice), heard(720))


async def test_evicted_and_then_lost_arrays_are_each_loaded_again(parts: Parts, stages: Stages) -> None:
    lost = ForgetfulPreprocessor(parts.mm_preprocessor, ObjectLost("lost"), 1)

    class Evicting(InProcessMMPreprocessor):
        evicted = False

        async def process(
            self, items: list[Media], settings: ProcessorSettings, context: CallContext
        ) -> Timed[list[MMFeatures]]:
            if not self.evicted:
                self.evicted = True
                raise ArraysEvicted("evicted")
            return await lost.process(items, settings, context)

    evicting = Evicting(parts.mm_preprocessor)
    (item,) = (await prepare(replace(stages, mm_preprocessor=evicting), heard(721))).items
    assert item.features.num_tokens > 0


class LosingPreprocessor(InProcessMMPreprocessor):
    """A preprocessor that loses the input of each item that it is to decode."""

    async def read(
        self,
        source: MediaSource,
        options: MediaOptions,
        settings: ProcessorSettings,
        uuid: MediaUUID | None,
        context: CallContext,
    ) -> Timed[MMItem]:
        raise ObjectLost("lost")


async def test_a_lost_input_does_not_count_as_a_death(parts: Parts, stages: Stages) -> None:
    loader = DyingLoader(parts.media_loader, 0)
    losing = replace(stages, media_loader=loader, mm_preprocessor=LosingPreprocessor(parts.mm_preprocessor))
    await prepare(losing, parsed(12))
    assert loader.attempts == [1]


async def test_the_media_of_a_request_are_bounded_together(stages: Stages) -> None:
    three = parsed(1, 2, 3)
    each = three.items[0].num_bytes
    with pytest.raises(MediaTooLarge, match=f"larger than {3 * each - 1} bytes in total") as caught:
        await prepare(stages, three, 3 * each - 1)
    assert caught.value.param == "messages[0].content[2]"
    await prepare(stages, three, 3 * each)


def test_a_sample_tells_data_apart_and_not_its_pieces() -> None:
    data = [bytes([letter]) * 40_000 for letter in b"abc"]
    whole = _sample(b"".join(data))
    pieces = (data[0][:9], data[0][9:], *data[1:])
    assert _sample(LongString((*data,))) == _sample(LongString(pieces)) == whole
    assert len({whole, _sample(b"".join(data[1:] + data[:1])), _sample(b"".join(data) + b"=")}) == 3


async def test_fetched_items_count_once_their_size_is_known(stages: Stages, tmp_path: Path) -> None:
    loader = MediaLoader(MediaLoaderConfig(allowed_local_media_path=str(tmp_path)))
    stages = replace(stages, media_loader=InProcessMediaLoader(loader))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.bmp")
    size = (tmp_path / "a.bmp").stat().st_size
    items = [
        Item(f"messages[0].content[{i}]", Modality.IMAGE, "url", url=f"file://{tmp_path}/a.bmp")
        for i in range(2)
    ]
    chat = ParsedChat(Chat([{"role": "user", "content": [{"type": "image"}] * 2}]), items)
    with pytest.raises(MediaTooLarge, match="in total"):
        await prepare(stages, chat, 2 * size - 1)
    # What was decoded is not held while the model works.
    prepared = await prepare(stages, chat, 2 * size)
    assert [item.media and item.media.payload for item in prepared.items] == [None] * 2
