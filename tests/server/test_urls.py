"""URLs of media: data URIs, media hosts, redirects, and addresses that must not be reached."""

from __future__ import annotations

import base64
import gzip
import socket
import zlib
from urllib.parse import quote, urlsplit

import pytest
from aiohttp import web
from PIL import Image

from tests.support.cluster import MediaServer, Server
from tests.support.hostile_urls import targets
from tests.support.media_files import encoded, flat_image, sound
from tests.support.page_host import PageHost, hosting
from tests.support.requests import RENDER, chat, data_uri, media

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def test_all_spellings_of_a_data_uri_give_the_same_image(server: Server) -> None:
    data = encoded(flat_image("red"))
    text = base64.b64encode(data).decode()
    digests = {
        server.render(media("image", url))["items"][0]["digest"]
        for url in (
            f"data:image/png;base64,{text}",
            f"data:image/jpeg;charset=utf-8;base64,{text}",
            f"data:image/png;name=a.png;base64,{text}",
            f"data:;base64,{text}",
            f"DATA:IMAGE/PNG;BASE64,{text}",
            f"data:image/png; base64,{text}",
            f"data:application/octet-stream;base64,{text.rstrip('=')}",
            f"data:image/png,{quote(data)}",
        )
    }
    assert len(digests) == 1
    assert "comma" in server.ask(media("image", f"data:image/png;base64{text}")).refusal(status=(400,))
    server.ask(media("image", f"data:image/png;base32,{text}")).refusal()


def test_data_of_the_wrong_modality_and_file_paths_are_refused(server: Server) -> None:
    url = data_uri("audio/wav", sound(3.2))  # some 100 kB
    assert server.render(media("audio", url))["items"][0]["modality"] == "audio"
    for kind in ("image", "video"):
        assert "file name" not in server.ask(media(kind, url)).refusal("messages[0].content[0]")
    for kind in ("image", "audio", "video"):
        for path in ("/etc/passwd", "file:///etc/passwd", "C:\\x.png", "ftp://h/x"):
            message = server.ask(media(kind, path)).refusal("messages[0].content[0]", (400, 422))
            assert "passwd" not in message


def test_base64_without_a_data_uri_is_refused(server: Server) -> None:
    for data in (
        encoded(flat_image("red"), "jpeg"),
        encoded(flat_image("red")),
        encoded(Image.effect_noise((300, 300), 80)),
    ):
        message = server.ask(media("image", base64.b64encode(data).decode())).refusal(
            "messages[0].content[0]", (400,)
        )
        assert "data:" in message


def test_the_bytes_decide_the_type_and_the_query_is_sent_unchanged(server: Server, host: PageHost) -> None:
    data = encoded(flat_image("red"), "jpeg")
    signature = "/pic?X-Amz-Signature=" + "0123456789abcdef" * 96 + "&a=%2F%2B"
    plain = ["/pic", "/pic.jpeg?auto=compress&cs=tinysrgb&w=1260", signature, "/bild%20eins.png", "/P.JPG"]
    host.pages = dict.fromkeys(plain, (200, {"Content-Type": "image/jpeg"}, data))
    host.pages |= {
        "/text": (200, {"Content-Type": "text/plain"}, data),
        "/untyped": (200, {}, data),
        "/attached": (200, {"Content-Disposition": "attachment; filename=x.exe"}, data),
        "/chunked": (200, {"Transfer-Encoding": "chunked"}, data),
        "/gzip": (200, {"Content-Encoding": "gzip"}, gzip.compress(data)),
        "/deflate": (200, {"Content-Encoding": "deflate"}, zlib.compress(data)),
        "/%E5%9B%BE.png": (200, {}, data),
    }
    paths = [*host.pages, "/图.png"]
    items = server.render(*(media("image", host.url + path) for path in paths))["items"]
    assert {item["digest"] for item in items} == {items[0]["digest"]}
    assert sorted(host.asked) == sorted([*host.pages, "/%E5%9B%BE.png"])
    host.pages["/br"] = (200, {"Content-Encoding": "br"}, b"\x8b\x00\x80\x03")
    message = server.ask(media("image", host.url + "/br")).refusal("messages[0].content[0]", (422, 502))
    assert "compression" in message


def test_the_error_names_the_status_of_the_media_host(server: Server, host: PageHost) -> None:
    host.pages = {
        "/ok": (200, {}, encoded(flat_image("red"))),
        "/403": (403, {"Content-Type": "text/plain"}, b"who are you?"),
        "/login": (200, {"Content-Type": "text/html"}, b"<!DOCTYPE html><html>log in</html>"),
    }
    assert server.ask(media("image", f"{host.url}/ok")).status == 200
    assert host.agents[0]
    assert "Python" not in str(host.agents[0])
    param = "messages[0].content[0]"
    assert "403 Forbidden" in server.ask(media("image", f"{host.url}/403")).refusal(param)
    assert "HTML" in server.ask(media("image", f"{host.url}/login")).refusal(param)


def test_every_hop_of_a_redirect_is_checked(server: Server, host: PageHost) -> None:
    """IPv4 loopback is allowed to this server, IPv6 loopback is not."""
    with hosting("::1") as inner:
        targets = {
            "/302": (302, f"{inner.url}/secret"),
            "/307": (307, f"{inner.url}/secret"),
            "/two": (301, "/302"),
            "/relative": (303, f"//{urlsplit(inner.url).netloc}/secret"),
            "/metadata": (302, "http://169.254.169.254/latest/meta-data/"),
            "/private": (308, "http://10.0.0.1/"),
            "/file": (302, "file:///etc/passwd"),
            "/decimal": (302, f"http://2130706433:{urlsplit(inner.url).port}/"),
            "/mapped": (302, f"http://[::ffff:10.0.0.1]:{urlsplit(inner.url).port}/"),
            "/self": (302, "/self"),
        }
        host.pages = {path: (status, {"Location": to}, b"") for path, (status, to) in targets.items()}
        inner.pages = {"/secret": (200, {}, encoded(flat_image("red")))}
        for path in targets:
            server.ask(media("image", host.url + path)).refusal("messages[0].content[0]", (400, 422))
        server.ask(media("image", f"{inner.url}/secret")).refusal("messages[0].content[0]", (400, 422))
        assert inner.asked == []
        assert host.asked.count("/self") <= 10
    host.pages = {
        "/a": (302, {"Location": "b?c=%2F"}, b""),
        "/b?c=%2F": (200, {}, encoded(flat_image("red"))),
    }
    assert server.ask(media("image", f"{host.url}/a")).status == 200


ITEM_OR_URL = ("messages[0].content[1]", "messages[0].content[1].image_url.url")


def test_no_hostile_url_makes_a_connection(server: Server, remote: MediaServer) -> None:
    """Each spelling by itself, and at the end of a redirect from a host that is allowed."""

    async def redirects(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": urls[int(request.path[1:])]})

    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        listener.setblocking(False)
        # A lone surrogate is no JSON, and refused as that.
        urls = [url for url in targets(listener.getsockname()[1]) if "\ud800" not in url]
        in_header = [
            i for i, url in enumerate(urls) if url.isprintable() and url.isascii() and len(url) < 4000
        ]
        remote.handlers = {f"/{i}": redirects for i in in_header}
        assert len(urls) > 120
        assert len(in_header) > 100
        for url in [*urls, *(f"{remote.url}/{i}" for i in in_header)]:
            answer = server.post(RENDER, chat("look:", media("image", url)))
            message = answer.body["error"]["message"]
            assert answer.body["error"]["param"] in ITEM_OR_URL, (url, message)
            # Only a failing resolver may give another status.
            assert answer.status in (400, 422) or "cannot be resolved" in message, (url, message)
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert remote.handlers.keys() <= set(remote.asked)  # each was there to be followed
