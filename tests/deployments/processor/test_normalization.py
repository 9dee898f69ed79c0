"""Patches travel as bytes, and normalizing them later gives every bit of the processor's values."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.processor.exactness import only_what_is_exact
from deployments.processor.item_processor import Handling, ItemProcessor
from deployments.processor.normalization import as_processed, declared_normalization, deferrable, normalize
from deployments.types import Arrays, Media, Modality, Normalization
from tests.support.tiny_families import FAMILIES
from tests.support.tiny_models import (
    OMNI,
    VL_SIZES,
    image,
    item_processor,
    processor,
    qwen3_vl,
    qwen_vl,
    video,
)

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

GRID = {"image_grid_thw": np.array([[1, 16, 16]])}
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5,) * 3, (0.5,) * 3


def pixels(seed: int = 0) -> npt.NDArray[np.uint8]:
    """Patches, [256, 12], with every byte in each channel."""
    each = np.random.default_rng(seed).permuted(np.tile(np.arange(256, dtype=np.uint8), (12, 1)), axis=1)
    return np.ascontiguousarray(each.T)


def features(values: npt.NDArray[Any]) -> Arrays:
    return {"pixel_values": values, **GRID}


def by_torchvision(
    raw: npt.NDArray[np.uint8], mean: tuple[float, ...] = CLIP[0], std: tuple[float, ...] = CLIP[1]
) -> npt.NDArray[np.float32]:
    """Normalizes as transformers' processors do: with mean and std at the scale of bytes."""
    import torch
    from torchvision.transforms.v2 import functional

    channels = torch.from_numpy(raw).reshape(len(raw), 3, 2, -1).float()
    scaled = [(torch.tensor(each) * (1.0 / (1 / 255))).tolist() for each in (mean, std)]
    values: npt.NDArray[np.float32] = functional.normalize(channels, *scaled).numpy().reshape(raw.shape)
    return values


def scaled(mean: tuple[float, ...], std: tuple[float, ...], factor: float = 1 / 255) -> Normalization:
    worker = SimpleNamespace(image_mean=mean, image_std=std, rescale_factor=factor)
    normalization = declared_normalization(worker)
    assert normalization is not None
    return normalization


@pytest.mark.parametrize("statistics", [CLIP, HALF])
def test_a_declared_normalization_gives_every_bit(statistics: Normalization) -> None:
    normalization = scaled(*statistics)
    exact = features(by_torchvision(pixels(), *statistics))
    assert deferrable(exact, features(pixels()), normalization) == {"pixel_values": normalization}
    other = pixels(1)[:100]
    assert np.array_equal(normalize(other, normalization), by_torchvision(other, *statistics))


def test_one_number_holds_for_all_channels() -> None:
    worker = SimpleNamespace(image_mean=0.5, image_std=0.5, rescale_factor=1 / 255)
    assert declared_normalization(worker) == scaled(*HALF)


def test_a_worker_that_declares_nothing_has_no_normalization() -> None:
    assert declared_normalization(None) is None
    assert declared_normalization(SimpleNamespace(image_mean=None, image_std=1.0, rescale_factor=1.0)) is None


def test_features_that_bytes_do_not_give_exactly_are_not_deferred() -> None:
    raw, exact = pixels(), by_torchvision(pixels())

    def deferred(exact: Arrays, raw: Arrays) -> dict[str, Normalization]:
        return deferrable(exact, raw, scaled(*CLIP))

    dented = exact.copy()
    dented[3, 7] = 0  # a pixel that is padding
    swapped = exact[:, [4, *range(1, 4), 0, *range(5, 12)]]  # of another channel
    bent = np.where(raw == 7, np.nextafter(exact, np.float32(9)), exact)  # by the last bit of one byte
    for odd in (dented, swapped, bent, exact[:-1], exact.astype(np.float64), exact[None], exact * 0, -exact):
        assert deferred(features(odd), features(raw)) == {}
    assert deferred(features(exact), features(exact)) == {}
    assert deferred(features(exact), GRID) == deferred({"pixel_values": exact}, {"pixel_values": raw}) == {}
    mask = {"mask": np.ones(3)}
    assert deferred(features(exact) | mask, features(raw)) == {}
    assert deferred(features(exact) | mask, features(raw) | {"mask": np.zeros(3)}) == {}
    assert deferrable(features(exact), features(raw), scaled(*HALF)) == {}, "another normalization"
    few = np.minimum(raw, 254)
    assert deferred(features(by_torchvision(few)), features(few)) == {}, "a byte was not seen"


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32))
def test_an_image_of_any_size_is_exact(height: int, width: int, seed: int) -> None:
    if max(height, width) > 150 * min(height, width):
        return  # the processor refuses it
    check(OMNI, image(seed, height, width))


@pytest.mark.parametrize("model", [OMNI, qwen_vl(), qwen3_vl()])
@pytest.mark.parametrize("item", [image(3), image(4, 200, 31), video(5), video(6, 3)], ids=str)
def test_every_bit_of_every_patch(model: str, item: tuple[Media, Arrays]) -> None:
    check(model, item)


def check(model: str, item: tuple[Media, Arrays]) -> None:
    processor = item_processor(model)
    (done,) = processor.process([item])
    (name,) = done.normalizations
    found = as_processed(done.record(None), done.features)
    (exact,) = (each.features for each in processor.handling({item[0].modality: Handling()}).process([item]))
    assert done.features[name].nbytes * 4 == exact[name].nbytes
    assert found[name].dtype == exact[name].dtype
    assert np.array_equal(found[name], exact[name])


def test_families_without_a_grid_of_patches_send_floats() -> None:
    llava = next(family for family in FAMILIES if family.name == "LLaVA-1.5")
    (done,) = item_processor(llava.folder()).process([image(1)])
    assert done.normalizations == {}
    assert done.features["pixel_values"].dtype == np.float32


def test_a_processor_that_does_not_resize_bytes_sends_floats() -> None:
    """No processor of transformers does this, but nothing rules it out. Some sizes do not reveal it."""
    from transformers import Qwen2VLImageProcessor

    class ResizesLast(Qwen2VLImageProcessor):  # type: ignore[misc]
        def _preprocess(self, images: list[Any], **kwargs: Any) -> Any:
            names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
            made = [self.rescale_and_normalize(each, *map(kwargs.get, names)) for each in images]
            return super()._preprocess(made, **kwargs | {"do_rescale": False, "do_normalize": False})

    assert_floats(ResizesLast)


def test_bytes_that_are_wrong_at_some_sizes_are_noticed_and_not_used() -> None:
    from transformers import Qwen2VLImageProcessor

    class OddBytes(Qwen2VLImageProcessor):  # type: ignore[misc]
        def _preprocess(self, images: list[Any], **kwargs: Any) -> Any:
            made = super()._preprocess(images, **kwargs)
            if not kwargs["do_normalize"] and max(images[0].shape) < 300:
                made["pixel_values"] ^= 1
            return made

    assert_floats(OddBytes)


def assert_floats(image_processor: Any) -> None:
    whole = copy.copy(processor(qwen_vl()))
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 1024 * 1024}
    whole.image_processor = image_processor(**VL_SIZES | {"size": sizes})
    items = only_what_is_exact(ItemProcessor(whole))
    assert Modality.IMAGE in items.spec().modalities
    (done,) = items.process([image(1)])
    assert done.normalizations == {}
    assert done.features["pixel_values"].dtype == np.float32
