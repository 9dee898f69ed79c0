"""The fan-out over the real stages in local mode, with one of them replaced where only a fault shows."""

import asyncio
import base64
import io
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image
from ray.exceptions import ActorDiedError, OwnerDiedError

from app.calls import Deadline
from app.config import AppConfig
from app.fanout import _sample
from app.intake.long_string import LongString
from app.openai.parse_chat import Item, ParsedChat
from deployments.errors import InvalidMedia, MediaTooLarge, ServingError, StageUnavailable
from deployments.stages.media_loader import MediaLoader
from deployments.stages.mm_preprocessor import MMPreprocessor
from deployments.types import Chat, Media, MMFeatures, MMItem, Modality, SamplingParams
from tests.support.local_graph import LocalGraph, local


@pytest.fixture(scope="module")
def graph() -> LocalGraph:
    return LocalGraph(AppConfig())


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


class DyingLoader(MediaLoader):
    """Stands for a replica that a file kills: in local mode no process can die."""

    def __init__(self, times: int) -> None:
        super().__init__(AppConfig().media_loader)
        self._times = times

    async def load(self, *args: object) -> Media:  # type: ignore[override]
        if self._times:
            self._times -= 1
            raise ActorDiedError
        return await super().load(*args)  # type: ignore[arg-type]


class CountingLoader(MediaLoader):
    """Holds its calls until 32 are there, and notes how many there were."""

    def __init__(self) -> None:
        super().__init__(AppConfig().media_loader)
        self._counts: list[int] = []
        self._now = 0
        self._full = asyncio.Event()

    async def load(self, *args: object) -> Media:  # type: ignore[override]
        self._now += 1
        self._counts.append(self._now)
        if self._now == 32:
            self._full.set()
        await self._full.wait()
        try:
            return await super().load(*args)  # type: ignore[arg-type]
        finally:
            self._now -= 1

    async def counts(self) -> list[int]:
        return self._counts


class ForgetfulPreprocessor(MMPreprocessor):
    """Stands for one whose input went with the process that owned it."""

    def __init__(self, times: int) -> None:
        super().__init__(AppConfig().mm_preprocessor, AppConfig().media_loader.decoder)
        self._times = times

    async def process(self, *args: object) -> MMFeatures:  # type: ignore[override]
        if self._times:
            self._times -= 1
            raise OwnerDiedError("00" * 28, None, "")
        return await super().process(*args)  # type: ignore[arg-type]


class DyingPreprocessor(MMPreprocessor):
    """Stands for one that a file kills."""

    def __init__(self) -> None:
        super().__init__(AppConfig().mm_preprocessor, AppConfig().media_loader.decoder)

    async def read(self, *_: object) -> MMItem:  # type: ignore[override]
        raise ActorDiedError


async def prepare(graph: LocalGraph, chat: ParsedChat, max_media_bytes: int = 2**20, **replaced: object):
    pipeline = await graph.pipeline(**replaced)
    return await pipeline.prepare(chat, pipeline.media_options, Deadline(30), max_media_bytes)


async def test_features_come_back_in_the_order_of_the_items(graph: LocalGraph) -> None:
    prepared = await prepare(graph, parsed(0, 255, 0))
    digests = [features.digest for features in prepared.features]
    assert digests[0] == digests[2] != digests[1]
    assert np.all(np.diff([span.offset for span in prepared.spans]) > 0)


async def test_a_request_has_so_many_items_in_flight_and_no_more(graph: LocalGraph) -> None:
    loader = local(CountingLoader)
    await prepare(graph, heard(*range(400, 440)), 2**22, media=loader)
    counts = await loader.counts.remote()
    assert len(counts) == 40
    assert max(counts) == 32


async def test_a_text_has_precedence_until_its_first_token_and_media_have_none(graph: LocalGraph) -> None:
    pipeline = await graph.pipeline()
    claims: list[int] = []  # as each is made
    claim = pipeline.precedence.hold_priority

    def counted() -> AbstractContextManager[None]:
        claims.append(pipeline.precedence._num_holders)
        return claim()

    pipeline.precedence.hold_priority = counted
    for chat, expected in (
        (parsed(11), []),
        (ParsedChat(Chat([{"role": "user", "content": "hi"}]), []), [0, 0]),
    ):
        prepared = await pipeline.prepare(chat, pipeline.media_options, Deadline(30), 2**20)
        deltas = pipeline.generate(prepared, SamplingParams(max_tokens=2), "key", Deadline(30))
        await anext(deltas)
        assert (claims, pipeline.precedence._num_holders) == (expected, 0)
        await deltas.aclose()


async def test_a_dead_loader_is_tried_once_more(graph: LocalGraph) -> None:
    prepared = await prepare(graph, heard(700), media=local(DyingLoader, 1))
    assert prepared.items[0].media.mime == "audio/wav"


async def test_a_file_that_kills_two_loaders_is_the_clients_error(graph: LocalGraph) -> None:
    with pytest.raises(InvalidMedia, match="failed twice") as caught:
        await prepare(graph, heard(700), media=local(DyingLoader, 2))
    assert caught.value.param == "messages[0].content[0]"


async def test_an_image_or_a_little_sound_in_the_request_needs_no_loader(graph: LocalGraph) -> None:
    for chat in (parsed(8), heard(730, seconds=0.5)):
        (item,) = (await prepare(graph, chat, media=local(DyingLoader, 2))).items
        assert item.features.num_tokens > 0
        assert list(item.timings) == ["MediaLoader", "MMPreprocessor"]
        assert all(timing.service > 0 for timing in item.timings.values())


async def test_an_image_that_kills_a_preprocessor_goes_to_the_loader(graph: LocalGraph) -> None:
    """Where the next crash costs less: it starts in a moment, and has nothing to lose."""
    stage = local(DyingPreprocessor)
    (item,) = (await prepare(graph, parsed(9), preprocessor=stage)).items
    assert item.media.info["width"] == 1
    with pytest.raises(InvalidMedia, match="failed twice") as caught:
        await prepare(graph, parsed(10), preprocessor=stage, media=local(DyingLoader, 1))
    assert caught.value.param == "messages[0].content[0]"


async def test_a_lost_array_is_loaded_again(graph: LocalGraph) -> None:
    prepared = await prepare(graph, heard(720), preprocessor=local(ForgetfulPreprocessor, 1))
    assert prepared.items[0].features.num_tokens > 0


async def test_an_array_lost_twice_is_the_servers_error(graph: LocalGraph) -> None:
    with pytest.raises(StageUnavailable, match="lost an input") as caught:
        await prepare(graph, heard(720), preprocessor=local(ForgetfulPreprocessor, 2))
    assert isinstance(caught.value, ServingError)
    assert caught.value.param == "messages[0].content[0]"


async def test_the_media_of_a_request_are_bounded_together(graph: LocalGraph) -> None:
    three = parsed(1, 2, 3)
    each = three.items[0].num_bytes
    with pytest.raises(MediaTooLarge, match=f"more than {3 * each - 1} bytes together") as caught:
        await prepare(graph, three, 3 * each - 1)
    assert caught.value.param == "messages[0].content[2]"
    await prepare(graph, three, 3 * each)


def test_a_sample_tells_data_apart_and_not_its_pieces() -> None:
    data = [bytes([letter]) * 40_000 for letter in b"abc"]
    whole = _sample(b"".join(data))
    pieces = (data[0][:9], data[0][9:], *data[1:])
    assert _sample(LongString((*data,))) == _sample(LongString(pieces)) == whole
    assert len({whole, _sample(b"".join(data[1:] + data[:1])), _sample(b"".join(data) + b"=")}) == 3


async def test_what_is_fetched_counts_as_it_comes(tmp_path: Path) -> None:
    graph = LocalGraph(AppConfig(media_loader={"allowed_local_media_path": str(tmp_path)}))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.bmp")
    size = (tmp_path / "a.bmp").stat().st_size
    items = [
        Item(f"messages[0].content[{i}]", Modality.IMAGE, "url", url=f"file://{tmp_path}/a.bmp")
        for i in range(2)
    ]
    chat = ParsedChat(Chat([{"role": "user", "content": [{"type": "image"}] * 2}]), items)
    with pytest.raises(MediaTooLarge, match="together"):
        await prepare(graph, chat, 2 * size - 1)
    # What was decoded is not held while the model works.
    prepared = await prepare(graph, chat, 2 * size)
    assert [item.media.payload for item in prepared.items] == [None] * 2
