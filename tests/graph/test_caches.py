"""Repeated items are not processed again: the preprocessing stage alone, and over the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.config import AppConfig
from deployments.errors import ArraysEvicted, UnknownUUID
from deployments.runtime.payload import unpack
from deployments.stages.mm_preprocessor import MMPreprocessor, MMPreprocessorConfig
from deployments.types import Media, MediaUUID, Modality
from tests.support.in_process import Direct
from tests.support.local_graph import LocalGraph
from tests.support.requests import COMPLETIONS, RENDER, chat, image_part
from tests.support.tiny_models import DECODER, image, qwen_vl

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

CAT = MediaUUID("", Modality.IMAGE, "cat")


@pytest.fixture
def stage() -> Direct[MMPreprocessor]:
    return Direct(MMPreprocessor(MMPreprocessorConfig(model=qwen_vl(), threads=2), DECODER))


def left_out(media: Media) -> Media:
    return replace(media, payload=None)


async def test_a_processed_item_needs_no_arrays(stage: Direct[MMPreprocessor]) -> None:
    media, _ = image(1)
    with pytest.raises(ArraysEvicted):
        await stage.process_one(left_out(media))
    first = await stage.process_one(media)
    again = await stage.process_one(left_out(media))
    assert (first.cached, again.cached) == (False, True)
    assert replace(again, cached=False) == first
    with pytest.raises(ArraysEvicted):
        await stage.process_one(left_out(media), {"max_pixels": 1024})


async def test_equal_items_at_once_are_processed_once(
    stage: Direct[MMPreprocessor], monkeypatch: pytest.MonkeyPatch
) -> None:
    processed = 0
    process = stage.stage._process

    def counting(*args: Any) -> Any:
        nonlocal processed
        processed += 1
        return process(*args)

    monkeypatch.setattr(stage.stage, "_process", counting)
    media, _ = image(2)
    features = await asyncio.gather(*(stage.process_one(media) for _ in range(32)))
    assert processed == 1
    assert len({each.digest for each in features}) == 1


async def test_a_uuid_recalls_the_item_last_sent_with_it(stage: Direct[MMPreprocessor]) -> None:
    with pytest.raises(UnknownUUID, match="'cat' does not name a cached image"):
        await stage.recall(CAT)
    for seed in (3, 4):
        features = await stage.process_one(replace(image(seed)[0], uuid=CAT))
    recalled = await stage.recall(CAT)
    assert recalled.features.digest == features.digest
    assert recalled.media.payload is None
    with pytest.raises(UnknownUUID):
        await stage.recall(CAT._replace(salt="another"))
    with pytest.raises(UnknownUUID):
        await stage.recall(CAT, {"max_pixels": 1024})  # nothing was processed so
    await stage.reset_cache()
    with pytest.raises(UnknownUUID):
        await stage.recall(CAT)


async def test_a_cache_of_zero_bytes_keeps_nothing() -> None:
    stage = Direct(MMPreprocessor(MMPreprocessorConfig(model=qwen_vl(), cache_bytes=0), DECODER))
    media, _ = image(1)
    assert not (await stage.describe()).caches
    assert not (await stage.process_one(media)).cached
    again = await stage.process_one(media)
    assert not again.cached
    assert (await unpack(again.payload)).keys() == again.shapes.keys()


@pytest.fixture(scope="module")
def graph() -> LocalGraph:
    return LocalGraph(AppConfig())


@pytest.fixture
async def api(graph: LocalGraph) -> AsyncIterator[httpx.AsyncClient]:
    async with await graph.client() as client:
        yield client


async def rendered(api: httpx.AsyncClient, *content: object, **fields: object) -> dict[str, Any]:
    answer = await api.post(RENDER, json=chat(*content, **fields))
    assert answer.status_code == 200, answer.text
    (item,) = answer.json()["items"]
    return dict(item)


async def test_an_image_sent_again_is_neither_decoded_nor_processed(api: httpx.AsyncClient) -> None:
    first = await rendered(api, image_part((1, 2, 3)))
    again = await rendered(api, "what?", image_part((1, 2, 3)))
    assert (first["cached"], again["cached"]) == (False, True)
    for key in ("digest", "media", "features", "num_tokens", "source"):
        assert again[key] == first[key]


async def test_a_cached_item_has_previews_too(api: httpx.AsyncClient) -> None:
    await rendered(api, image_part((3, 2, 1)))
    assert (await rendered(api, image_part((3, 2, 1)), previews=True))["previews"]


async def test_an_item_that_was_evicted_is_decoded_again(api: httpx.AsyncClient, graph: LocalGraph) -> None:
    first = await rendered(api, image_part((9, 9, 9)))
    await graph.handles["MMPreprocessor"].reset_cache.remote()
    again = await rendered(api, image_part((9, 9, 9)))
    assert not again["cached"]
    assert again["digest"] == first["digest"]


async def test_an_item_is_recalled_by_its_uuid_alone(api: httpx.AsyncClient) -> None:
    named = image_part((5, 5, 5)) | {"uuid": "mine"}
    alone = {"type": "image_url", "image_url": None, "uuid": "mine"}
    first = await rendered(api, named)
    again = await rendered(api, alone)
    assert again["digest"] == first["digest"]
    assert again["source"] == {"kind": "uuid", "bytes": first["source"]["bytes"], "mime": "image/png"}
    answers = [
        (await api.post(COMPLETIONS, json=chat(part, "what is this?", max_tokens=8))).json()
        for part in (named, alone)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    for body in (chat(alone, cache_salt="other"), chat(alone | {"uuid": "yours"})):
        refused = await api.post(RENDER, json=body)
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "unknown_uuid"
        assert refused.json()["error"]["param"] == "messages[0].content[0]"


async def test_an_item_in_flight_needs_no_arrays(stage: Direct[MMPreprocessor]) -> None:
    media, _ = image(5)
    first, joined = await asyncio.gather(stage.process_one(media), stage.process_one(left_out(media)))
    assert joined == first
