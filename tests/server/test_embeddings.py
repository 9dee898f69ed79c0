"""Embeddings between real processes: the official client, references, memory, cancellation."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest
import torch

from tests.support.cluster import Server, media_server, wait_until
from tests.support.embeddings import audio_embeds, tensor2base64
from tests.support.media_files import png
from tests.support.raw_http import connect, send
from tests.support.requests import COMPLETIONS, chat, data_uri, media
from tests.support.tiny_models import encoded_by_omni

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

MIB = 2**20


def test_the_official_client_sends_embeddings_like_to_vllm(client: openai.OpenAI) -> None:
    """The parts and the calls are those of vLLM's page on multimodal inputs."""
    image = encoded_by_omni("photo.png")
    grid = image.embeds["image_embeds"]["image_grid_thw"]
    embeds = {
        "type": "image_embeds",
        "image_embeds": {
            "image_embeds": tensor2base64(image.values),  # Shape: (image_feature_size, hidden_size)
            "image_grid_thw": grid,
        },
        "uuid": "https://host/photo.png",  # Optional
    }
    model = client.models.list().data[0].id

    def answer(part: Any) -> str | None:
        return (
            client.chat.completions.create(
                messages=[
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": [{"type": "text", "text": "What's in this image?"}, part]},
                ],
                model=model,
            )
            .choices[0]
            .message.content
        )

    expected = answer(image.media)
    assert expected
    assert answer(embeds) == expected
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        answer({"type": "image_embeds", "image_embeds": tensor2base64(torch.zeros(4, 7))})
    assert caught.value.param == "messages[1].content[1]"


def test_answered_and_refused_embeddings_leave_no_memory(server: Server) -> None:
    """After an answer from embeddings by reference, and after 16 MB that were too many for the context."""
    answered = chat(audio_embeds(800), "what?", max_tokens=2)  # 400 KB
    refused = chat(audio_embeds(32 * 1024), "what?")

    def both() -> None:
        assert server.post(COMPLETIONS, answered).status == 200
        assert server.post(COMPLETIONS, refused).body["error"]["code"] == "context_length_exceeded"

    with server.object_store() as store:
        idle = store()
        both()  # what is made once and kept, is made now
        wait_until(lambda: store() <= idle, why=lambda: f"{store()}, {idle} before")
        before = {stage: server.own_bytes(stage) for stage in ("Ingress", "EmbeddingLoader", "Model")}
        for _ in range(5):
            both()
        wait_until(lambda: store() <= idle, why=lambda: f"{store()}, {idle} before")

        def grown() -> dict[str, int]:
            return {stage: server.own_bytes(stage) - size for stage, size in before.items()}

        # Allocators keep some of what is given back, but not the 22 MB of five bodies, nor five times 16 MB.
        wait_until(lambda: all(size < 48 * MIB for size in grown().values()), why=lambda: str(grown()))


def test_a_client_that_leaves_frees_its_embeddings(server: Server) -> None:
    """The embeddings are loaded, and wait for an image that never comes."""
    asked = threading.Event()

    async def never(_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    with media_server() as remote, server.object_store() as store:
        remote.handlers = {"/0.png": never}
        idle = store()
        connection = connect(server)
        send(connection, chat(audio_embeds(32 * 1024), media("image", f"{remote.url}/0.png")))
        assert asked.wait(10)
        wait_until(lambda: store()[1] >= idle[1] + 16 * MIB, why=lambda: str(store()))
        connection.close()
        wait_until(lambda: remote.left, why=lambda: "the image is still awaited")
        wait_until(lambda: store() <= idle, why=lambda: f"{store()}, {idle} before")


def test_a_refused_item_leaves_no_object(server: Server) -> None:
    thin = media("image", data_uri("image/png", png(size=(60_000, 2))))  # 360 KB when decoded
    with server.object_store() as store:
        idle = store()
        assert server.post(COMPLETIONS, chat(thin)).status == 422
        wait_until(lambda: store() <= idle, why=lambda: f"{store()}, {idle} before")
