"""One item through the stage; that it equals a joint call is tested in test_assemble.py."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deployments.errors import InvalidMedia, MediaTooLarge, StageTimeout, UnsupportedMedia
from deployments.media import image as images
from deployments.media.containers import DecodingCancelled
from deployments.processor.item_processor import ItemProcessor
from deployments.processor.normalization import as_processed
from deployments.runtime.payload import pack_pieces, unpack
from deployments.stages.media_loader import MediaLoader, MediaLoaderConfig
from deployments.stages.mm_preprocessor import MMPreprocessor, MMPreprocessorConfig
from deployments.types import (
    Arrays,
    CallHeader,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    Modality,
    Payload,
    VideoMetadata,
)
from tests.support.in_process import Direct
from tests.support.tiny_families import FAMILIES
from tests.support.tiny_models import (
    DECODER,
    MODELS,
    OMNI,
    audio,
    chat,
    image,
    item_processor,
    joint_call,
    processor,
    qwen3_vl,
    qwen_vl,
    video,
)

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(scope="module")
def stage() -> Direct[MMPreprocessor]:
    return Direct(MMPreprocessor(MMPreprocessorConfig(threads=2), DECODER))


@pytest.fixture(scope="module")
def vl_stage() -> Direct[MMPreprocessor]:
    return Direct(MMPreprocessor(MMPreprocessorConfig(model=qwen_vl()), DECODER))


async def test_an_item_becomes_features_and_a_replacement(stage: Direct[MMPreprocessor]) -> None:
    media, _ = image(1, 64, 64)
    features = await stage.process_one(media)
    image_token = processor(OMNI).image_token_id
    assert (features.modality, features.affixes) == (Modality.IMAGE, ("", ""))
    assert features.replacement == [(image_token, features.num_tokens)]
    assert features.length == features.num_tokens == 16
    arrays = await unpack(features.payload)
    assert arrays.keys() == {"pixel_values", "image_grid_thw"}
    assert arrays["pixel_values"].dtype == np.uint8  # on its way
    shapes = {name: (array.shape, array.dtype.name) for name, array in as_processed(features, arrays).items()}
    assert features.shapes == shapes
    assert shapes["pixel_values"] == ((64, 768), "float32")


async def test_many_items_at_once_do_not_mix(stage: Direct[MMPreprocessor]) -> None:
    items = [image(seed, 20 + seed, 60 - seed) for seed in range(12)]
    results = await asyncio.gather(*(stage.process_one(media) for media, _ in items))
    for (media, arrays), features in zip(items, results, strict=True):
        alone = item_processor(OMNI).process([(media, arrays)])[0].features
        np.testing.assert_array_equal((await unpack(features.payload))["pixel_values"], alone["pixel_values"])


@pytest.mark.parametrize(
    ("model", "item"),
    [("omni", audio(1))]
    + [(model, item) for model in MODELS for item in (image(1), image(2, 48, 48), video(3))],
)
def test_inputs_are_never_written_to(model: str, item: tuple[Media, Arrays]) -> None:
    """They may lie in the object store, where others read them."""
    media, arrays = item
    before = {name: array.copy() for name, array in arrays.items()}
    item_processor(MODELS[model]()).process([(media, arrays)])
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


async def test_a_modality_that_the_model_lacks(vl_stage: Direct[MMPreprocessor]) -> None:
    with pytest.raises(UnsupportedMedia, match="does not accept audio"):
        await vl_stage.process_one(audio(1)[0])


async def test_what_the_processor_complains_of_reaches_the_client(stage: Direct[MMPreprocessor]) -> None:
    with pytest.raises(
        InvalidMedia, match="refuses this image: absolute aspect ratio must be smaller than 200"
    ):
        await stage.process_one(image(1, height=1, width=300)[0])


def test_complaints_carry_no_paths_and_no_reprs() -> None:
    class Grumbler(type(processor(OMNI))):  # type: ignore[misc]
        def __call__(self, **_: object) -> None:
            raise ValueError("cannot read /srv/models/secret.bin into\n <object at 0x7f>")

    grumbler = rebuilt(Grumbler)

    with pytest.raises(InvalidMedia) as caught:
        ItemProcessor(grumbler).process([image(1)])
    assert str(caught.value) == "The model's processor refuses this image: cannot read (...) into (...)."


async def test_a_short_sound_is_padded_with_silence(stage: Direct[MMPreprocessor]) -> None:
    media, arrays = audio(1, seconds=0.01)
    features = await stage.process_one(media)
    padded = {"samples": np.pad(arrays["samples"], (0, 4800 - 160))}
    expected = joint_call(OMNI, chat(media), [(media, padded)])
    assert features.num_tokens == (expected["input_ids"] == processor(OMNI).audio_token_id).sum() > 0
    arrays = await unpack(features.payload)
    np.testing.assert_array_equal(arrays["input_features"], expected["input_features"].numpy())


async def test_a_sound_that_would_be_cut_is_refused(stage: Direct[MMPreprocessor]) -> None:
    await stage.process_one(audio(1, seconds=30)[0])
    with pytest.raises(MediaTooLarge, match=r"30\.1 s long; the model takes at most 30 s"):
        await stage.process_one(audio(1, seconds=30.1)[0])


@pytest.mark.parametrize(("every", "seconds"), [(5, 0.5), (2, 0.2)])
async def test_each_video_keeps_its_own_rate(
    stage: Direct[MMPreprocessor], every: int, seconds: float
) -> None:
    """`seconds` from one frame to the next: a position of time takes several frames."""
    media, _ = video(1, frames=8)
    assert media.video_metadata
    metadata: VideoMetadata = {
        **media.video_metadata,
        "total_num_frames": 8 * every,
        "frames_indices": [every * i for i in range(8)],
    }
    features = await stage.process_one(replace(media, digest=f"every {every}", video_metadata=metadata))
    arrays = await unpack(features.payload)
    patch = processor(OMNI).video_processor.temporal_patch_size
    np.testing.assert_allclose(arrays["video_second_per_grid"], [patch * seconds])


def test_the_checkpoints_own_video_size_wins_over_the_processors_class() -> None:
    own = processor(OMNI).video_processor.size
    processed = item_processor(OMNI).process([video(1, 8, 480, 640)])[0]
    patches = processed.features["video_grid_thw"][0, 1:].prod()
    assert patches * processor(OMNI).video_processor.patch_size ** 2 <= own["longest_edge"]


def rebuilt(cls: Any) -> Any:
    """The bundled model's processor as another class."""
    own = processor(OMNI)
    parts = (own.image_processor, own.video_processor, own.feature_extractor, own.tokenizer)
    return cls(*parts, chat_template=own.chat_template)


async def test_no_time_left(stage: Direct[MMPreprocessor]) -> None:
    with pytest.raises(StageTimeout, match="deadline passed"):
        await Direct(stage.stage, timeout_s=0).process_one(image(1)[0])


def test_plain_text_at_the_edge_of_a_replacement_becomes_affixes() -> None:
    """It can grow together with the prompt, so it is encoded with the prompt."""

    class Wordy(type(processor(OMNI))):  # type: ignore[misc]
        def replace_image_token(self, *args: object, **kwargs: object) -> str:
            return f"here\n\n{super().replace_image_token(*args, **kwargs)} !"

    wordy = rebuilt(Wordy)
    wordy.chat_template = "look: <|IMAGE|> there"
    (processed,) = ItemProcessor(wordy).process([image(1)])
    assert processed.affixes == ("here\n\n", " !")
    assert set(processed.token_ids) == {wordy.image_token_id}


def test_times_in_plain_text_between_special_tokens_are_exact() -> None:
    """They are part of the replacement, but no embedding fills them; the first goes with the prompt."""
    (processed,) = item_processor(qwen3_vl()).process([video(1)])
    text = processor(qwen3_vl()).tokenizer.decode(processed.token_ids)
    assert processed.affixes == ("<0.2 seconds>", "")
    assert text.startswith("<|vision_start|><|video_pad|>")
    assert "<|vision_end|><1.2 seconds><|vision_start|>" in text
    assert text.endswith("<|video_pad|><|vision_end|>")
    assert processed.num_tokens == text.count("<|video_pad|>") < len(processed.token_ids)
    assert processed.features["mm_token_type_ids"].shape == (1, len(processed.token_ids))


async def test_the_digest_knows_all_that_shaped_the_features(vl_stage: Direct[MMPreprocessor]) -> None:
    media, other = image(1)[0], replace(image(1)[0], digest="another")
    settings: list[dict[str, int | bool]] = [
        {},
        {"max_pixels": 1024},
        {"max_pixels": 2048},
        {"min_pixels": 1024},
    ]
    names = [(await vl_stage.process_one(media, each)).digest for each in settings]
    names.append((await vl_stage.process_one(other)).digest)
    assert len(set(names)) == len(names)
    assert (await vl_stage.process_one(media, {"do_pan_and_scan": True})).digest == names[0]


async def test_description(stage: Direct[MMPreprocessor], vl_stage: Direct[MMPreprocessor]) -> None:
    omni, vl = await stage.describe(), await vl_stage.describe()
    assert omni.modalities == [Modality.IMAGE, Modality.AUDIO, Modality.VIDEO]
    assert omni.options == MediaOptions(sampling_rate=16000, num_frames=8, fps=None)
    assert vl.modalities == [Modality.IMAGE, Modality.VIDEO]
    assert vl.options == MediaOptions(sampling_rate=16000, num_frames=768, fps=2.0)


@pytest.mark.parametrize("name", ["Gemma 3n", "Gemma 4"])
def test_a_sound_longer_than_what_an_extractor_looks_at_by_default_is_refused(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    items = ItemProcessor(processor(family.folder()))
    items.process([audio(1, seconds=30)])
    with pytest.raises(MediaTooLarge, match=r"30\.1 s long; the model takes at most 30 s"):
        items.process([audio(1, seconds=30.1)])


def test_an_extractor_that_cuts_nothing_takes_any_sound() -> None:
    family = next(family for family in FAMILIES if family.name == "Phi-4-multimodal")
    (short,), (long,) = (
        ItemProcessor(processor(family.folder())).process([audio(1, seconds)]) for seconds in (30, 60)
    )
    assert long.num_tokens > 1.9 * short.num_tokens


async def sent(picture: Image.Image, kind: str = "png") -> MediaSource:
    file = io.BytesIO()
    picture.save(file, kind)
    payload = await pack_pieces([base64.b64encode(file.getvalue())])
    return MediaSource(Modality.IMAGE, "data", header=f"image/{kind};base64", payloads=[payload])


def noise(size: tuple[int, int] = (64, 48)) -> Image.Image:
    return Image.effect_noise(size, 80).convert("RGB")


def fresh(**limits: int) -> Direct[MMPreprocessor]:
    return Direct(MMPreprocessor(MMPreprocessorConfig(), MediaLoaderConfig.model_validate(limits).decoder))


@pytest.mark.parametrize("kind", ["png", "jpeg"])
async def test_an_image_read_here_is_what_it_is_by_way_of_the_loader(kind: str) -> None:
    picture, options = noise(), MediaOptions(background=(1, 2, 3))
    done = await fresh().read(await sent(picture, kind), options)
    media = await Direct(MediaLoader(MediaLoaderConfig())).load(await sent(picture, kind), options)
    features = await fresh().process_one(media)
    assert done.features == features  # with all bits of it
    assert done.media == replace(media, payload=None)


async def test_an_image_read_before_is_known_by_content_and_by_name(stage: Direct[MMPreprocessor]) -> None:
    picture, name = noise(), MediaUUID("", Modality.IMAGE, "read")
    first = await stage.read(await sent(picture), MediaOptions(), None, name)
    again = await stage.read(await sent(picture), MediaOptions())
    assert (first.features.cached, again.features.cached) == (False, True)
    assert (again.features.digest, again.media.digest) == (first.features.digest, first.media.digest)
    assert (await stage.recall(name)).features.digest == first.features.digest
    loaded = Media(Modality.IMAGE, first.media.digest)
    assert (await stage.process_one(loaded)).cached


async def test_images_read_one_after_another_do_not_mix() -> None:
    """They are decoded into the same memory."""
    stage, sources = fresh(), [await sent(noise((64, side)), "jpeg") for side in (64, 48, 64)]
    done = [await stage.read(source, MediaOptions()) for source in sources]
    for source, each in zip(sources, done, strict=True):
        alone = await fresh().read(source, MediaOptions())
        assert each.features.payload == alone.features.payload


async def test_features_by_reference_are_in_no_message(
    stage: Direct[MMPreprocessor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Payload(9, ref="in the object store")
    monkeypatch.setattr("deployments.stages.mm_preprocessor.pack", lambda arrays: stored)
    source = await sent(noise((99, 48)))
    for in_message in (True, False):
        done = await stage.read(source, MediaOptions(), None, None, in_message)
        assert done.features.payload == (None if in_message else stored)
        assert done.features.num_tokens > 0


async def test_equal_images_at_once_are_decoded_once(
    stage: Direct[MMPreprocessor], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = 0

    def counting(*args: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return decode(*args)

    decode = images.decode
    monkeypatch.setattr(images, "decode", counting)
    picture = noise()
    sources = [await sent(picture) for _ in range(8)]
    done = await asyncio.gather(*(stage.read(source, MediaOptions()) for source in sources))
    assert decoded == 1
    assert len({each.features.digest for each in done}) == 1


@pytest.mark.parametrize(
    ("limits", "told"),
    [({"max_image_pixels": 100}, "64x48 pixels"), ({"max_image_bytes": 100}, "limit of 100 bytes")],
)
async def test_an_image_read_here_has_the_loaders_limits(limits: dict[str, int], told: str) -> None:
    header = CallHeader(param="there")
    with pytest.raises(MediaTooLarge, match=told) as caught:
        await fresh(**limits).stage.read(header, await sent(noise()), MediaOptions())
    assert caught.value.param == "there"


async def test_what_is_no_image_and_what_has_no_time(stage: Direct[MMPreprocessor]) -> None:
    payload = await pack_pieces([b"AAAA"])
    with pytest.raises(UnsupportedMedia, match="not an image in a supported format"):
        await stage.read(
            MediaSource(Modality.IMAGE, "data", header="image/png;base64", payloads=[payload]),
            MediaOptions(),
        )
    with pytest.raises(StageTimeout, match="deadline passed"):
        await Direct(stage.stage, timeout_s=0).read(await sent(noise()), MediaOptions())


async def test_cancelling_a_read_stops_the_decoder(
    stage: Direct[MMPreprocessor], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def held(data: bytes, limits: object, cancelled: threading.Event, canvas: object) -> None:
        begun.set()
        if cancelled.wait(10):
            stopped.set()
        raise DecodingCancelled

    monkeypatch.setattr(images, "decode", held)
    task = asyncio.create_task(stage.read(await sent(noise()), MediaOptions()))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(stopped.wait, 10)
