"""Normalization that the model's stage does instead of the processor.

Some processors cut pictures into patches and compute each value from one byte: (byte - mean) / std in
float32, with one mean and one std for each channel. If that formula gives the processor's bits for all 256
bytes, patches travel and are kept as bytes, a quarter of the size, and the model's stage applies the formula.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deployments.types import Arrays, MMFeatures, Normalization

CHANNELS = 3
AS_BYTES = {
    "do_rescale": False,
    "do_normalize": False,
}  # a processor's arguments that leave the bytes as they are


def declared_normalization(worker: object) -> Normalization | None:
    """Mean and std of bytes, as an image or video processor declares them; None if it declares none.

    transformers folds the rescaling from bytes to [0, 1] into both, in float32.
    """
    mean, std = getattr(worker, "image_mean", None), getattr(worker, "image_std", None)
    factor = getattr(worker, "rescale_factor", None)
    if mean is None or std is None or not factor:
        return None
    scaled = [np.asarray(each, np.float32) * np.float32(1 / factor) for each in (mean, std)]
    means, stds = (tuple(np.broadcast_to(each, CHANNELS).tolist()) for each in scaled)
    return means, stds


def deferrable(exact: Arrays, raw: Arrays, normalization: Normalization) -> dict[str, Normalization]:
    """The features to normalize later, by name; empty unless `raw` then gives every bit of `exact`.

    Both are features of one item: as the processor makes them, and made with AS_BYTES. Only an item that has
    all 256 bytes in each channel can prove that the formula holds for every item.
    """
    deferred = {
        name: normalization
        for name, pixels in raw.items()
        if pixels.dtype == np.uint8 and _fills_a_grid(pixels, raw) and _has_all_bytes(pixels)
    }
    ours = _normalized(raw, deferred)
    is_exact = exact.keys() == ours.keys() and all(
        exact[name].dtype == array.dtype and np.array_equal(exact[name], array)
        for name, array in ours.items()
    )
    return deferred if is_exact else {}


def _fills_a_grid(pixels: npt.NDArray[np.uint8], features: Arrays) -> bool:
    """Patches [t * h * w, CHANNELS * n]: every value comes from a pixel, none is padding."""
    grids = [grid for name, grid in features.items() if name.endswith("grid_thw")]
    num_patches = sum(int(np.prod(grid, axis=-1).sum()) for grid in grids)
    return pixels.ndim == 2 and len(pixels) == num_patches and pixels.shape[1] % CHANNELS == 0


def _has_all_bytes(pixels: npt.NDArray[np.uint8]) -> bool:
    return all(len(np.unique(channel)) == 256 for channel in np.split(pixels, CHANNELS, axis=1))


def as_processed(features: MMFeatures, arrays: Arrays) -> Arrays:
    """The features as the processor gives them; `arrays` are those of the payload."""
    return _normalized(arrays, features.normalizations)


def _normalized(arrays: Arrays, by_name: dict[str, Normalization]) -> Arrays:
    return {
        name: normalize(array, by_name[name]) if name in by_name else array for name, array in arrays.items()
    }


def normalize(pixels: npt.NDArray[np.uint8], normalization: Normalization) -> npt.NDArray[np.float32]:
    """`pixels` and the result are [patches, CHANNELS * n]; the result is a new array."""
    mean, std = (np.array(each, np.float32)[:, None] for each in normalization)
    values = np.empty(pixels.shape, np.float32)
    channels = values.reshape(len(pixels), CHANNELS, -1)
    np.subtract(pixels.reshape(channels.shape), mean, out=channels)
    channels /= std
    return values
