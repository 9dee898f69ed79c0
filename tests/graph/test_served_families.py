"""Families whose items need more than a call for each: from the request to the tokens."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from PIL import Image
from ray.exceptions import OwnerDiedError

from app.config import AppConfig
from deployments.stages.mm_preprocessor import MMPreprocessor
from deployments.types import MMBatch, MMItem
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
    """Gemma 3: texts of items grow together with the prompt. LLaVA-OneVision: several images in one call."""
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
    """Loses its inputs the first time."""

    forgets = True

    async def process_together(self, *args: Any) -> MMBatch:
        if self.forgets:
            self.forgets = False
            raise OwnerDiedError("00" * 28, None, "")
        return await super().process_together(*args)


async def test_items_that_go_together_are_loaded_again_where_one_is_lost() -> None:
    served = graph(checkpoint("LLaVA-OneVision"))
    forgetful = local(Forgetful, served.config.mm_preprocessor, served.config.media_loader.decoder)
    async with await served.client(preprocessor=forgetful) as client:
        rendered = await client.post("/v1/chat/completions/render", json=body())
    assert rendered.status_code == 200
    assert len(rendered.json()["items"]) == 3


async def test_one_broken_item_of_those_that_go_together_is_named() -> None:
    content: list[object] = [*body()["messages"][0]["content"]]  # type: ignore[index]
    content[3] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    broken = {"messages": [{"role": "user", "content": content}]}
    async with await graph(checkpoint("LLaVA-OneVision")).client() as client:
        answer = await client.post("/v1/chat/completions", json=broken)
    assert answer.status_code == 415
    assert answer.json()["error"]["param"] == "messages[0].content[3]"


class OneShort(MMPreprocessor):
    """Its items take a place less in the prompt than the model has embeddings for."""

    async def read(self, *args: Any) -> MMItem:
        done = await super().read(*args)
        replacement = done.features.replacement
        most = max(range(len(replacement)), key=lambda i: replacement[i][1])
        token_id, count = replacement[most]
        replacement[most] = (token_id, count - 1)
        return done


async def test_a_wrong_number_of_placeholders_is_an_error_of_that_request_alone() -> None:
    served = graph(checkpoint("Idefics3"))
    short = local(OneShort, served.config.mm_preprocessor, served.config.media_loader.decoder)
    async with await served.client(preprocessor=short) as client:
        broken = await client.post("/v1/chat/completions", json=body())
        text = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True}
        fine = await client.post("/v1/chat/completions", json=text)
    assert broken.status_code == 500
    assert broken.json()["error"]["message"] == "The model failed on this request."
    assert fine.status_code == 200


class TooLargeForAMessage(MMPreprocessor):
    asked: ClassVar[list[bool]] = []

    async def read(self, *args: Any) -> MMItem:
        done = await super().read(*args)
        *_, by_reference, _ = args
        self.asked.append(by_reference)
        return done if by_reference else replace(done, features=replace(done.features, payload=None))


async def test_features_that_no_message_holds_are_asked_for_by_reference() -> None:
    served = graph(checkpoint("Idefics3"))
    other = local(TooLargeForAMessage, served.config.mm_preprocessor, served.config.media_loader.decoder)
    answers = []
    for stages in ({}, {"preprocessor": other}):
        async with await served.client(**stages) as client:
            answers.append((await client.post("/v1/chat/completions", json=body())).json())
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    # The largest file is from the first.
    assert sorted(TooLargeForAMessage.asked) == [False] * 2 + [True] * 3


async def test_what_was_asked_for_twice_is_told_as_worked_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call finds it in the stage's cache; the request has brought something new all the same."""
    monkeypatch.setattr(TooLargeForAMessage, "asked", [])
    served = graph(checkpoint("Idefics3"))
    other = local(TooLargeForAMessage, served.config.mm_preprocessor, served.config.media_loader.decoder)
    async with await served.client(preprocessor=other) as client:
        first, again = [
            (await client.post("/v1/chat/completions/render", json=body())).json()["items"] for _ in range(2)
        ]
    assert sorted(TooLargeForAMessage.asked)[:2] == [False] * 2, "none was asked for twice"
    assert [item["cached"] for item in first] == [False] * 3
    assert [item["cached"] for item in again] == [True] * 3
    for item in first:
        load, preprocess = item["timings_ms"]["MediaLoader"], item["timings_ms"]["MMPreprocessor"]
        assert load["service"] > 0 < preprocess["service"]
        assert preprocess["start"] == pytest.approx(load["start"] + load["queue"] + load["service"], abs=0.01)
