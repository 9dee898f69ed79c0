"""Patches as the bytes that they are before a processor normalizes them: a quarter to copy, send and keep.

Processors that cut pictures into patches make each value of one byte and of its channel alone, as
(byte - mean) / std in float32. Where that gives every bit for all 256 bytes, the model's stage does it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deployments.types import Arrays, MMFeatures, Normalization

CHANNELS = 3
AS_BYTES = {"do_rescale": False, "do_normalize": False}  # a processor's arguments that leave the bytes be
_ULPS = 16  # how far from what the values tell of a mean it may be


def learn(exact: Arrays, raw: Arrays) -> dict[str, Normalization]:
    """By feature, so that `raw` gives `exact` in every bit; none where it does not.

    Both are the features of one item, which has every value of a byte in each channel: as the processor makes
    them, and made with AS_BYTES.
    """
    learnt: dict[str, Normalization] = {}
    for name in exact.keys() | raw.keys():
        values, pixels = exact.get(name), raw.get(name)
        if values is None or pixels is None or values.shape != pixels.shape:
            return {}
        if pixels.dtype == np.uint8 and values.dtype == np.float32 and _fills_a_grid(values, exact):
            fitted = _fit(values, pixels)
            if fitted is None:
                return {}
            learnt[name] = fitted
            pixels = normalize(pixels, fitted)
        if pixels.dtype != values.dtype or not np.array_equal(pixels, values):
            return {}
    return learnt


def _fills_a_grid(values: npt.NDArray[np.float32], features: Arrays) -> bool:
    """Patches, [t * h * w, CHANNELS * n]: nothing is there but what comes from a pixel."""
    grids = [grid for name, grid in features.items() if name.endswith("grid_thw")]
    num_patches = sum(int(np.prod(grid, axis=-1).sum()) for grid in grids)
    return values.ndim == 2 and len(values) == num_patches and values.shape[1] % CHANNELS == 0


def _fit(values: npt.NDArray[np.float32], pixels: npt.NDArray[np.uint8]) -> Normalization | None:
    every = np.arange(256, dtype=np.float32)
    found: list[tuple[float, float]] = []
    for bytes_, floats in zip(np.split(pixels, CHANNELS, 1), np.split(values, CHANNELS, 1), strict=True):
        wanted = np.full(256, np.nan, np.float32)
        wanted[bytes_] = floats
        if np.isnan(wanted).any() or wanted[0] >= wanted[-1]:
            return None
        std = 255 / (float(wanted[-1]) - float(wanted[0]))
        near = ((m, s) for s in _around(std) for m in _around(-float(wanted[0]) * std))
        fitting = next(
            ((float(m), float(s)) for m, s in near if np.array_equal((every - m) / s, wanted)), None
        )
        if fitting is None:
            return None
        found.append(fitting)
    means, stds = zip(*found, strict=True)
    return means, stds


def _around(value: float) -> npt.NDArray[np.float32]:
    nearest = np.float32(value)
    near: npt.NDArray[np.float32] = nearest + np.arange(-_ULPS, _ULPS + 1) * np.spacing(nearest)
    return near.astype(np.float32)


def as_processed(features: MMFeatures, arrays: Arrays) -> Arrays:
    """The features as the processor gives them; `arrays` as they are in the payload."""
    by_name = features.normalizations
    return {
        name: normalize(array, by_name[name]) if name in by_name else array for name, array in arrays.items()
    }


def normalize(pixels: npt.NDArray[np.uint8], normalization: Normalization) -> npt.NDArray[np.float32]:
    """`pixels`: [patches, CHANNELS * n], and so is the result, in memory of its own."""
    mean, std = (np.array(each, np.float32)[:, None] for each in normalization)
    values = np.empty(pixels.shape, np.float32)
    channels = values.reshape(len(pixels), CHANNELS, -1)
    np.subtract(pixels.reshape(channels.shape), mean, out=channels)
    channels /= std
    return values
