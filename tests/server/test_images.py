"""Images: sizes, formats, orientation, transparency, damage and counts."""

from __future__ import annotations

import io
import time

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from tests.support.cluster import Server, read, wait_until
from tests.support.media_files import Frame, damaged_png, encoded, flat_image
from tests.support.page_host import PageHost
from tests.support.requests import data_uri, image_part, media, previews

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def shown(server: Server, part: object) -> Frame:
    """The first preview of a request's only item."""
    return previews(server.render(part, previews=True)["items"][0])[0]


def test_an_image_of_any_size_has_the_feature_rows_of_its_tokens(server: Server) -> None:
    sides = (1, 2, 3, 13, 27, 28, 29, 47, 48, 49, 70)
    sizes = [(w, h) for w in sides for h in sides] + [(27, 257), (1000, 31), (333, 777)]
    for some in (sizes[::2], sizes[1::2]):
        items = server.render(*(image_part("red", size) for size in some))["items"]
        for item, size in zip(items, some, strict=True):
            assert (item["media"]["width"], item["media"]["height"]) == size
            assert item["features"]["pixel_values"]["shape"][0] == 4 * item["num_tokens"] > 0
            assert item["placeholder"]["length"] >= item["num_tokens"]
    odd = [image_part("red", size) for size in ((1, 1), (27, 257), (1000, 31), (333, 777), (70, 1))]
    assert server.ask(*odd).status == 200


_STORED = {  # what makes an upright picture what a camera stores under the tag
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def test_every_exif_orientation_is_applied_once(server: Server) -> None:
    upright = flat_image("white", (96, 64))
    upright.paste("red", (0, 0, 16, 64))
    upright.paste("blue", (0, 0, 96, 16))

    def photo(tag: int) -> dict[str, object]:
        stored = upright.transpose(_STORED[tag]) if tag in _STORED else upright
        exif = Image.Exif()
        exif[0x0112] = tag
        return media("image", data_uri("image/jpeg", encoded(stored, "jpeg", quality=95, exif=exif)))

    items = server.render(*(photo(tag) for tag in range(1, 9)), previews=True)["items"]
    for item in items:
        assert (item["media"]["width"], item["media"]["height"]) == (96, 64)
        (pixels,) = previews(item)
        assert np.abs(pixels.astype(int) - np.asarray(upright)).mean() < 5


def test_the_colour_of_transparent_pixels_stays_hidden(server: Server) -> None:
    def logo(hidden: tuple[int, int, int, int]) -> Image.Image:
        image = flat_image(hidden, mode="RGBA")
        image.paste((0, 128, 0, 255), (12, 12, 36, 36))
        return image

    one, other = logo((255, 0, 255, 0)), logo((0, 0, 0, 0))
    palette = flat_image(0, mode="P")
    palette.putpalette([255, 0, 255, 0, 128, 0])
    palette.paste(1, (12, 12, 36, 36))
    grey = flat_image((0, 0), mode="LA")
    grey.paste((128, 255), (12, 12, 36, 36))
    rgb = flat_image((255, 0, 255))
    rgb.paste((0, 128, 0), (12, 12, 36, 36))
    seen = [
        shown(server, media("image", data_uri("image/png", data)))
        for data in (
            encoded(one),
            encoded(other),
            encoded(one, "webp", lossless=True, exact=True),
            encoded(palette, transparency=0),
            encoded(rgb, transparency=(255, 0, 255)),
            encoded(grey),
        )
    ]
    for pixels in seen:
        assert pixels[0, 0].tolist() == [255, 255, 255]
    for pixels in seen[1:5]:
        assert (pixels == seen[0]).all()
    assert seen[0][24, 24].tolist() == [0, 128, 0]
    assert seen[5][24, 24].tolist() == [128, 128, 128]


def test_tiny_images_work_alone_and_among_larger_ones(server: Server) -> None:
    tiny = [image_part("red", size) for size in ((1, 1), (3, 3), (3, 1), (1, 3), (2, 2))]
    for part in tiny:
        assert server.ask(part).status == 200
    mixed = server.render(*tiny, image_part("blue", (918, 1850)), previews=True)
    assert [previews(item)[0][0, 0].tolist() for item in mixed["items"][:5]] == [[255, 0, 0]] * 5
    server.assert_answers()


def test_a_small_file_of_many_pixels_is_decoded(server: Server) -> None:
    image = encoded(Image.new("L", (4000, 4000)), "png")
    (item,) = server.render(media("image", data_uri("image/png", image)))["items"]
    assert item["media"]["width"] == 4000
    assert item["num_tokens"] > 0


BROKEN = {
    "damaged-png": data_uri("image/png", damaged_png()),
    "cut-png": data_uri("image/png", encoded(Image.effect_noise((64, 64), 80))[:500]),
    "cut-jpeg": data_uri("image/jpeg", encoded(Image.effect_noise((64, 64), 80), "jpeg")[:400]),
    "empty": "data:image/png;base64,",
    "hello": data_uri("image/png", b"Hello World"),
    "exe": data_uri("image/png", b"MZ\x90\x00" + bytes(500)),
    "heic": data_uri("image/heic", b"\x00\x00\x00\x18ftypheic" + bytes(500)),
    "svg": data_uri("image/svg+xml", b'<svg xmlns="http://www.w3.org/2000/svg"/>'),
    "html": data_uri("image/png", b"<!doctype html><html></html>"),
    "x-foo": data_uri("image/x-foo", bytes(range(256))),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_broken_image_is_refused_at_once_and_leaves_no_work(server: Server, stream: bool) -> None:
    for name, url in BROKEN.items():
        start = time.monotonic()
        message = server.ask("look", media("image", url), stream=stream).refusal("messages[0].content[1]")
        assert time.monotonic() - start < 2, name
        assert len(message) > 20, name
    (pid,) = server.replicas("MMPreprocessor")
    used = [-1]

    def idle() -> bool:
        used.append(sum(map(int, read(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:13])))
        return used[-1] == used[-2]

    wait_until(idle, why=lambda: f"still busy: {used}")
    server.assert_answers()


def test_every_image_format_is_decoded_or_refused_by_name(server: Server) -> None:
    green = flat_image((0, 128, 0), (64, 64))
    heic = io.BytesIO()
    pillow_heif.from_pillow(green).save(heic)
    without = server.render("look")["num_prompt_tokens"]
    for data in (encoded(green, "webp"), encoded(green, "avif"), encoded(green, "tiff"), heic.getvalue()):
        body = server.render(media("image", data_uri("image/png", data)), "look", previews=True)
        (item,) = body["items"]
        assert body["num_prompt_tokens"] >= without + item["num_tokens"] > without
        assert np.abs(previews(item)[0].astype(int) - (0, 128, 0)).max() < 6
    jxl = data_uri("image/jxl", b"\x00\x00\x00\x0cJXL \r\n\x87\n" + bytes(100))
    assert "JPEG XL" in server.ask(media("image", jxl)).refusal("messages[0].content[0]")


@pytest.mark.parametrize("count", [1, 10, 11, 64])
def test_many_images_in_one_message_are_answered(server: Server, count: int) -> None:
    parts = [image_part((i, 0, 0), (8, 8)) for i in range(count)]
    assert server.ask(*parts, max_tokens=2).status == 200


def test_images_beyond_the_context_give_one_clear_error(server: Server) -> None:
    small = image_part("red", (8, 8))
    answer = server.ask(*[small] * 250, max_tokens=2)
    assert answer.status == 200 or "token" in answer.refusal(status=(400,))
    server.assert_answers()


def test_images_beyond_the_limit_are_not_fetched(server: Server, host: PageHost) -> None:
    parts = [media("image", f"{host.url}/{i}") for i in range(1000)]
    message = server.ask(*parts).refusal("messages[0].content[999]", (400,))
    assert "1000" in message
    assert "999" in message
    assert host.asked == []
