"""Requests to families whose items need more than one call each, from the request to the tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Generator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from PIL import Image
from ray.exceptions import OwnerDiedError

from app.config import AppConfig
from deployments.processor.item_processor import ItemProcessor
from deployments.stages.mm_preprocessor import MMPreprocessor
from deployments.types import Arrays, InputSpec, Payload
from tests.support.family_models import checkpoint
from tests.support.local_graph import LocalGraph, local
from tests.support.tiny_models import chat, image, joint_call

pytestmark = pytest.mark.usefixtures("one_thread")

ITEMS = [image(i, *size) for i, size in enumerate(((40, 56), (100, 30), (560, 270)))]


def body(**fields: object) -> dict[str, object]:
    pngs = [{"type": "image_url", "image_url": {"url": as_png(arrays["pixels"])}} for _, arrays in ITEMS]
    content = ["One:\n", pngs[0], "two ", pngs[1], pngs[2], "and now?"]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True, **fields}


def as_png(pixels: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


CONVERSATION = chat("One:\n", ITEMS[0][0], "two ", ITEMS[1][0], ITEMS[2][0], "and now?")


def graph(folder: str) -> LocalGraph:
    return LocalGraph(AppConfig.model_validate({"model": folder}))


@pytest.mark.parametrize("name", ["Gemma 3", "LLaVA-OneVision", "Idefics3"])
async def test_prompts_are_those_of_one_joint_call(name: str) -> None:
    """Gemma 3 has affixes that merge with the prompt. LLaVA-OneVision takes several images in one call."""
    folder = checkpoint(name)
    async with await graph(folder).client() as client:
        rendered = (await client.post("/v1/chat/completions/render", json=body())).json()
        answer = (await client.post("/v1/chat/completions", json=body())).json()
    expected = joint_call(folder, CONVERSATION, ITEMS)["input_ids"][0].tolist()
    assert rendered["prompt_token_ids"] == expected
    assert [item["param"] for item in rendered["items"]] == [f"messages[0].content[{i}]" for i in (1, 3, 4)]
    assert answer["usage"]["prompt_tokens"] == len(expected)
    assert answer["usage"]["completion_tokens"] == 4


async def test_settings_reach_the_processor_and_others_are_refused() -> None:
    folder = checkpoint("Gemma 3")
    async with await graph(folder).client() as client:
        plain, cropped = [
            (await client.post("/v1/chat/completions/render", json=body(mm_processor_kwargs=kwargs))).json()
            for kwargs in ({}, {"do_pan_and_scan": True})
        ]
        refused = await client.post("/v1/chat/completions", json=body(mm_processor_kwargs={"max_pixels": 99}))
    expected = joint_call(folder, CONVERSATION, ITEMS, do_pan_and_scan=True)["input_ids"][0].tolist()
    assert cropped["prompt_token_ids"] == expected != plain["prompt_token_ids"]
    assert not {i["digest"] for i in plain["items"]} & {i["digest"] for i in cropped["items"]}
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].endswith("Its settings: do_pan_and_scan.")


class Forgetful(MMPreprocessor):
    """Loses its inputs on the first call."""

    forgets = True

    async def process(self, *args: Any) -> Any:
        if self.forgets:
            self.forgets = False
            raise OwnerDiedError("00" * 28, None, "")
        return await super().process(*args)


async def test_items_of_a_joint_modality_are_loaded_again_if_one_is_lost() -> None:
    served = graph(checkpoint("LLaVA-OneVision"))
    forgetful = local(Forgetful, served.config.mm_preprocessor, served.config.media_loader.decoder)
    async with await served.client(MMPreprocessor=forgetful) as client:
        rendered = await client.post("/v1/chat/completions/render", json=body())
    assert rendered.status_code == 200
    assert len(rendered.json()["items"]) == 3


async def test_a_broken_item_of_a_joint_modality_is_named() -> None:
    content: list[object] = [*body()["messages"][0]["content"]]  # type: ignore[index]
    content[3] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    broken = {"messages": [{"role": "user", "content": content}]}
    async with await graph(checkpoint("LLaVA-OneVision")).client() as client:
        answer = await client.post("/v1/chat/completions", json=broken)
    assert answer.status_code == 415
    assert answer.json()["error"]["param"] == "messages[0].content[3]"


class OneShort(MMPreprocessor):
    """Makes one placeholder token less than the model has embeddings for."""

    async def read(self, *args: Any) -> Any:
        done = await super().read(*args)
        replacement = done.value.features.replacement
        most = max(range(len(replacement)), key=lambda i: replacement[i][1])
        token_id, count = replacement[most]
        replacement[most] = (token_id, count - 1)
        return done


async def test_a_wrong_number_of_placeholders_fails_only_that_request() -> None:
    served = graph(checkpoint("Idefics3"))
    short = local(OneShort, served.config.mm_preprocessor, served.config.media_loader.decoder)
    async with await served.client(MMPreprocessor=short) as client:
        broken = await client.post("/v1/chat/completions", json=body())
        text = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True}
        fine = await client.post("/v1/chat/completions", json=text)
    assert broken.status_code == 500
    assert broken.json()["error"]["message"] == "The model failed on this request."
    assert fine.status_code == 200


class TooLargeForAMessage(MMPreprocessor):
    asked: ClassVar[list[bool]] = []

    async def describe(self) -> InputSpec:
        return replace(await super().describe(), small_images_inline=True)

    async def read(self, *args: Any) -> Any:
        reply = await super().read(*args)
        in_message = args[-1]
        self.asked.append(not in_message)
        item = reply.value
        left_out = replace(item, features=replace(item.features, payload=None))
        return replace(reply, value=left_out) if in_message else reply


async def test_features_that_are_too_large_for_a_message_are_requested_by_reference() -> None:
    served = graph(checkpoint("Idefics3"))
    other = local(TooLargeForAMessage, served.config.mm_preprocessor, served.config.media_loader.decoder)
    answers = []
    for stages in ({}, {"MMPreprocessor": other}):
        async with await served.client(**stages) as client:
            answers.append((await client.post("/v1/chat/completions", json=body())).json())
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    # The file of the largest image is not small, so the first call asks for a reference.
    assert sorted(TooLargeForAMessage.asked) == [False] * 2 + [True] * 3


async def test_an_item_that_was_requested_twice_is_reported_as_processed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second call finds it in the cache, but for the request the item was still new."""
    monkeypatch.setattr(TooLargeForAMessage, "asked", [])
    served = graph(checkpoint("Idefics3"))
    other = local(TooLargeForAMessage, served.config.mm_preprocessor, served.config.media_loader.decoder)
    async with await served.client(MMPreprocessor=other) as client:
        first, again = [
            (await client.post("/v1/chat/completions/render", json=body())).json()["items"] for _ in range(2)
        ]
    assert sorted(TooLargeForAMessage.asked)[:2] == [False] * 2, "none was requested twice"
    assert [item["cached"] for item in first] == [False] * 3
    assert [item["cached"] for item in again] == [True] * 3
    for item in first:
        assert item["timings_ms"]["MMPreprocessor"]["service"] > 0


class Stored:
    """Stands in for a reference to the object store."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def __await__(self) -> Generator[None, None, Arrays]:
        return self._arrays
        yield


async def test_features_left_out_of_a_message_are_not_processed_again_without_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_reference = []

    class Recording(MMPreprocessor):
        async def describe(self) -> InputSpec:
            return replace(await super().describe(), small_images_inline=True)

        async def read(self, *args: Any) -> Any:
            by_reference.append(not args[-1])
            return await super().read(*args)

    processed = []
    process = ItemProcessor.process

    def recording(items: ItemProcessor, *args: Any) -> Any:
        processed.append(args)
        return process(items, *args)

    served = LocalGraph(
        AppConfig.model_validate({"model": checkpoint("Idefics3"), "mm_preprocessor": {"cache_bytes": 0}})
    )
    other = local(Recording, served.config.mm_preprocessor, served.config.media_loader.decoder)
    store = "deployments.stages.mm_preprocessor.pack"
    monkeypatch.setattr(store, lambda arrays: Payload(9, ref=Stored(arrays)))
    async with await served.client(MMPreprocessor=other) as client:
        monkeypatch.setattr(ItemProcessor, "process", recording)
        answer = await client.post("/v1/chat/completions", json=body())
    assert answer.status_code == 200
    assert by_reference.count(False) >= 1
    assert by_reference.count(True) == len(ITEMS) == len(processed)
