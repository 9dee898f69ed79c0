"""Embeddings over the API, with the real stages in local mode: what is sent, shown, counted and refused."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from app.config import AppConfig
from app.fanout import FanOut
from app.observe import Traffic
from app.openai.parse_chat import parse_chat
from app.openai.requests import parse_chat_request
from app.ray_stages import connect
from app.stages import Deadline
from deployments.errors import UnsupportedMedia
from deployments.processor.checkpoint import load_model
from deployments.types import Modality
from tests.support.corpus import embedding_files
from tests.support.local_graph import LocalGraph
from tests.support.paths import CORPUS
from tests.support.requests import COMPLETIONS, RENDER, chat
from tests.support.tiny_models import OMNI, Encoded, as_sent, encoded_by_omni, tokenizer, wide_omni

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

PLACE = "messages[0].content[0]"


@pytest.fixture(scope="module")
def graph() -> LocalGraph:
    limits = {Modality.IMAGE: 2, Modality.AUDIO: 2, Modality.VIDEO: 2}
    return LocalGraph(AppConfig(enable_mm_embeds=True, enable_prompt_embeds=True, limit_mm_per_prompt=limits))


@pytest.fixture
async def api(graph: LocalGraph) -> AsyncIterator[httpx.AsyncClient]:
    async with await graph.client() as client:
        yield client


@pytest.fixture(scope="module")
def image() -> Encoded:
    return encoded_by_omni("photo.png")


async def answer(api: httpx.AsyncClient, *content: object) -> str:
    response = await api.post(COMPLETIONS, json=chat(*content))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def refusal(api: httpx.AsyncClient, status: int, *content: object) -> dict[str, Any]:
    response = await api.post(RENDER, json=chat(*content))
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def base64(tensor: torch.Tensor) -> str:
    return as_sent(tensor).tobytes().decode()


@pytest.mark.parametrize("sample", ["photo.png", "sound.wav", "clip.mp4"])
async def test_embeddings_give_the_answer_of_their_media(api: httpx.AsyncClient, sample: str) -> None:
    item = encoded_by_omni(sample)
    by_media = await answer(api, item.media, "what is it?")
    assert await answer(api, item.embeds, "what is it?") == by_media
    assert by_media.strip()


async def test_render_shows_embeddings_like_media(api: httpx.AsyncClient, image: Encoded) -> None:
    response = await api.post(RENDER, json=chat("a", image.embeds, previews=True))
    (item,) = response.json()["items"]
    sent = image.embeds["image_embeds"]
    tokens = len(image.values)
    assert item["modality"] == "image"
    assert item["num_tokens"] == item["placeholder"]["length"] == tokens
    assert item["source"] == {"kind": "embeds", "bytes": sum(map(len, sent.values())), "mime": None}
    assert item["features"] == {
        "image_embeds": {"shape": [tokens, 128], "dtype": "float32"},
        "image_grid_thw": {"shape": [1, 3], "dtype": "int64"},
    }
    assert item["timings_ms"].keys() == {"EmbeddingLoader"}
    assert "previews" not in item
    by_media = (await api.post(RENDER, json=chat("a", image.media))).json()
    assert response.json()["prompt_token_ids"] == by_media["prompt_token_ids"]


async def test_embedded_text_gives_the_answer_of_the_text(api: httpx.AsyncClient, image: Encoded) -> None:
    encoder = tokenizer(OMNI)
    words = encoder._tokenizer.encode("what is it?", add_special_tokens=False)
    rows = load_model(OMNI, "cpu", "auto").get_input_embeddings()(torch.tensor(words)).detach()
    part = {"type": "prompt_embeds", "data": base64(rows)}
    assert await answer(api, image.media, part) == await answer(api, image.media, "what is it?")
    rendered = (await api.post(RENDER, json=chat(image.embeds, part))).json()
    assert [item["modality"] for item in rendered["items"]] == ["image", "prompt"]
    span = rendered["items"][1]["placeholder"]
    filler = encoder.spec.plain_token_id
    ids = rendered["prompt_token_ids"][span["offset"] : span["offset"] + span["length"]]
    assert ids == [filler] * len(words)


async def test_usage_counts_embeddings_like_their_media(api: httpx.AsyncClient, image: Encoded) -> None:
    usages = [
        (await api.post(COMPLETIONS, json=chat(part, max_tokens=1))).json()["usage"]
        for part in (image.media, image.embeds)
    ]
    assert usages[0] == usages[1]
    assert usages[0]["prompt_tokens_details"]["image_tokens"] == len(image.values)


async def test_a_bare_tensor_is_accepted_if_the_model_needs_no_more(api: httpx.AsyncClient) -> None:
    sound = encoded_by_omni("sound.wav")
    bare = {"type": "audio_embeds", "audio_embeds": sound.embeds["audio_embeds"]["audio_embeds"]}
    assert await answer(api, bare, "what?") == await answer(api, sound.media, "what?")


async def test_a_long_embedding_is_accepted(api: httpx.AsyncClient) -> None:
    part = {"type": "audio_embeds", "audio_embeds": base64(torch.randn(1000, 128))}
    response = await api.post(RENDER, json=chat(part))
    assert response.json()["items"][0]["num_tokens"] == 1000


async def test_embeddings_longer_than_the_context_are_refused(api: httpx.AsyncClient) -> None:
    part = {"type": "audio_embeds", "audio_embeds": base64(torch.randn(5000, 128))}
    error = await refusal(api, 400, part)
    assert error["code"] == "context_length_exceeded"
    assert f"{PLACE} has 5000 of them" in error["message"]


async def test_item_limits_count_embeddings_too(api: httpx.AsyncClient, image: Encoded) -> None:
    error = await refusal(api, 400, image.embeds, image.media, image.embeds)
    assert error["param"] == "messages[0].content[2]"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"audio_embeds": "QUJD"}, "not in a known format"),
        ({"audio_embeds": "!!!!"}, "not valid base64"),
        ({"audio_embeds": base64(torch.zeros(3, 127))}, "hidden size is 127; the model's is 128"),
        ({"image_embeds": base64(torch.zeros(3, 128))}, "This model needs image_grid_thw"),
        ({"image_embeds": base64(torch.zeros(3, 127))}, "hidden size is 127"),
        ({"prompt_embeds": base64(torch.full((3, 128), torch.nan))}, "is not finite"),
        (
            {"image_embeds": {"image_embeds": base64(torch.zeros(3, 128)), "image_grid_thw": [1, 4, 4]}},
            "there are 3 embeddings",
        ),
        (
            {"image_embeds": {"image_embeds": base64(torch.zeros(3, 128)), "image_grid_thw": "QUJD"}},
            "image_grid_thw: ",
        ),
    ],
)
async def test_embeddings_that_do_not_fit_are_refused_with_a_reason(
    api: httpx.AsyncClient, part: dict[str, object], reason: str
) -> None:
    error = await refusal(api, 422, part, "hello")
    assert error["param"] == PLACE
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("part", "setting"),
    [
        ({"type": "image_embeds", "image_embeds": "QUJD"}, "enable_mm_embeds"),
        ({"type": "audio_embeds", "audio_embeds": "QUJD"}, "enable_mm_embeds"),
        ({"type": "video_embeds", "video_embeds": "QUJD"}, "enable_mm_embeds"),
        ({"type": "prompt_embeds", "data": "QUJD"}, "enable_prompt_embeds"),
    ],
)
async def test_embeddings_are_off_by_default(graph: LocalGraph, part: dict[str, Any], setting: str) -> None:
    async with await graph.client(AppConfig().api) as api:
        error = await refusal(api, 400, part)
    assert error["param"] == PLACE
    assert part["type"] in error["message"]
    assert setting in error["message"]


@pytest.mark.parametrize("kind", ["image_embeds", "prompt_embeds"])
async def test_a_model_without_embeddings_refuses_them(graph: LocalGraph, kind: str) -> None:
    stages, _ = await connect(graph.handles, Traffic())
    spec = replace(stages.model_spec, hidden_size=None)
    fan_out = FanOut(replace(stages, model_spec=spec))
    parsed = parse_chat(parse_chat_request(chat({kind: "QUJD"})))
    with pytest.raises(UnsupportedMedia, match=f"does not accept {kind}") as caught:
        await fan_out.prepare(parsed, fan_out.media_options, Deadline(30), 2**20)
    assert caught.value.param == PLACE


@pytest.fixture(scope="module")
def wide_graph() -> LocalGraph:
    return LocalGraph(AppConfig(model=wide_omni(), enable_mm_embeds=True))


@pytest.mark.parametrize("row", embedding_files())
async def test_corpus_files_of_the_right_width_work(wide_graph: LocalGraph, row: dict[str, Any]) -> None:
    sent = b64encode((CORPUS / "media" / row["file"]).read_bytes()).decode()
    part = {"image_embeds": {"image_embeds": sent, "image_grid_thw": [1, 4, 4]}}
    async with await wide_graph.client() as api:
        response = await api.post(COMPLETIONS, json=chat(part, "what is it?", max_tokens=2))
    if response.status_code == 200:
        assert row["outcome"] != "reject"
        assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 4
    else:
        assert row["outcome"] != "accept", response.text
        assert response.status_code == 422
        assert response.json()["error"]["param"] == PLACE
