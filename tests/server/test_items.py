"""Items of one request between processes: in flight together, in order, cancelled together."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from tests.support.cluster import Handler, MediaServer, Server, wait_until
from tests.support.media_files import damaged_png, png
from tests.support.paths import ROOT
from tests.support.requests import COMPLETIONS, RENDER, chat, data_uri, image_part, media, previews

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def test_all_items_are_in_flight_at_once_and_keep_their_order(
    server: Server, remote: MediaServer, six_items: list[dict[str, object]]
) -> None:
    all_requested = asyncio.Barrier(6)
    gates = [asyncio.Event() for _ in range(7)]

    def held(i: int) -> Handler:
        async def handler(_: object) -> None:
            await all_requested.wait()  # no item is answered before all six are in flight
            if i < 5:
                await gates[i + 1].wait()  # and the last item is answered first
            gates[i].set()

        return handler

    remote.handlers = {path: held(i) for i, path in enumerate(remote.content)}
    rendered = server.render(*six_items, "what do you see and hear?")
    assert [i["param"] for i in rendered["items"]] == [f"messages[0].content[{i}]" for i in range(6)]
    assert [i["modality"] for i in rendered["items"]] == [
        *("image", "audio", "video"),
        *("audio", "image", "video"),
    ]
    facts = [i["media"] for i in rendered["items"]]
    assert facts[0]["width"] == 48
    assert facts[1]["duration_s"] == pytest.approx(0.5)
    assert facts[2]["num_frames"] == 4
    assert facts[3]["duration_s"] == pytest.approx(1.0)
    assert facts[4]["width"] == 96
    assert facts[5]["num_frames"] == 8
    offsets = [i["placeholder"]["offset"] for i in rendered["items"]]
    assert offsets == sorted(offsets)
    assert sorted(remote.asked) == sorted(remote.content)


def test_a_failing_item_cancels_its_siblings_and_is_named(
    server: Server, remote: MediaServer, six_items: list[dict[str, object]]
) -> None:
    others_are_in = asyncio.Barrier(6)

    async def never(_: object) -> None:
        await others_are_in.wait()
        await asyncio.Event().wait()

    async def fails(_: object) -> None:
        await others_are_in.wait()

    remote.handlers = {**dict.fromkeys(remote.content, never), "/3.wav": fails}
    del remote.content["/3.wav"]
    start = time.monotonic()
    answer = server.post(COMPLETIONS, chat(*six_items))
    assert answer.status == 422
    assert answer.body["error"]["param"] == "messages[0].content[3]"
    assert time.monotonic() - start < 5
    wait_until(lambda: len(remote.left) == 5, why=lambda: f"still loading: {remote.left}")


def test_each_image_stays_between_its_texts(server: Server) -> None:
    tokenizer = Tokenizer.from_file(str(ROOT / "deployments/tiny_omni/tokenizer.json"))
    red, blue = image_part("red"), image_part("blue")
    first = server.render("alpha", red, "bravo", blue, "charlie", previews=True)
    swapped = server.render("alpha", blue, "bravo", red, "charlie", previews=True)
    ids, spans = first["prompt_token_ids"], [item["placeholder"] for item in first["items"]]
    edges = [0, *(e for s in spans for e in (s["offset"], s["offset"] + s["length"])), len(ids)]
    texts = [tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    for text, word in zip(texts, ("alpha", "bravo", "charlie"), strict=True):
        assert [w for w in ("alpha", "bravo", "charlie") if w in text] == [word]
    assert swapped["prompt_token_ids"] == ids
    digests, others = ([item["digest"] for item in r["items"]] for r in (first, swapped))
    assert digests == others[::-1]
    colours = [previews(item)[0][0, 0].tolist() for item in first["items"]]
    assert colours == [[255, 0, 0], [0, 0, 255]]


def test_many_small_items_may_exceed_a_grpc_message_together(server: Server) -> None:
    """Each travels in-band; together they pass the size of a gRPC message."""
    images = [media("image", data_uri("image/png", png(i, (128, 128)))) for i in range(30)]
    answer = server.post(COMPLETIONS, chat(*images, "what do you see?", max_tokens=1))
    assert answer.status == 200, answer.body


def test_no_client_gets_the_image_of_another(server: Server) -> None:
    """Each client gets the digests and pixels of its own images, with broken images in between."""
    colours = [(16 * i, 255 - 16 * i, 8 * i) for i in range(16)]
    parts = [image_part(colour) for colour in colours]
    digests = [item["digest"] for item in server.render(*parts)["items"]]
    assert len(set(digests)) == 16

    def client(which: int) -> None:
        for turn in range(6):
            if (which + turn) % 5 == 0:
                server.post(RENDER, chat(media("image", data_uri("image/png", damaged_png())))).refusal()
            other = (which + turn) % 16
            items = server.render(parts[which], parts[other], previews=True)["items"]
            assert [item["digest"] for item in items] == [digests[which], digests[other]]
            seen = [tuple(previews(item)[0][7, 7].tolist()) for item in items]
            assert seen == [colours[which], colours[other]]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
