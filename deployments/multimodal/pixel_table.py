"""Patches as the bytes that they are before a processor makes float32 of them: a quarter to copy and to send.

Processors that cut pictures into patches make each value of one byte and its channel alone. So the bytes, and
a table of the 256 values of each channel, give every bit of what the processor would have given.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from deployments.types import Arrays, MMFeatures, Tables

T = TypeVar("T", np.uint8, np.float32)

CHANNELS = 3
AS_BYTES = {"do_rescale": False, "do_normalize": False}  # a processor's arguments that leave the bytes be


def learn(exact: Arrays, raw: Arrays) -> Tables:
    """With them `raw` gives `exact` in every bit; none where it does not.

    Both are the features of one item, which has every value of a byte in each channel: as the processor makes
    them, and made with AS_BYTES.
    """
    tables: Tables = {}
    for name in exact.keys() | raw.keys():
        values, pixels = exact.get(name), raw.get(name)
        if values is None or pixels is None or values.shape != pixels.shape:
            return {}
        if pixels.dtype == np.uint8 and values.dtype == np.float32 and _fills_a_grid(values, exact):
            table = _table(values, pixels)
            if np.isnan(table).any():
                return {}
            tables[name] = table.tobytes()
            pixels = look_up(tables[name], pixels)
        if pixels.dtype != values.dtype or not np.array_equal(pixels, values):
            return {}
    return tables


def _fills_a_grid(values: npt.NDArray[np.float32], features: Arrays) -> bool:
    """Patches, [t * h * w, CHANNELS * n]: nothing is there but what comes from a pixel."""
    grids = [grid for name, grid in features.items() if name.endswith("grid_thw")]
    num_patches = sum(int(np.prod(grid, axis=-1).sum()) for grid in grids)
    return values.ndim == 2 and len(values) == num_patches and values.shape[1] % CHANNELS == 0


def _table(values: npt.NDArray[np.float32], pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """NaN for bytes that `pixels` have not."""
    table = np.full((CHANNELS, 256), np.nan, np.float32)
    for row, bytes_, floats in zip(table, _by_channel(pixels), _by_channel(values), strict=True):
        row[bytes_] = floats
    return table


def as_processed(features: MMFeatures, arrays: Arrays) -> Arrays:
    """The features as the processor gives them; `arrays` as they are in the payload."""
    tables = features.tables
    return {name: look_up(tables[name], array) if name in tables else array for name, array in arrays.items()}


def look_up(table: bytes, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """`pixels`: [patches, CHANNELS * n], and so is the result."""
    values = np.empty(pixels.shape, np.float32)
    rows = np.frombuffer(table, np.float32).reshape(CHANNELS, 256)
    for row, bytes_, floats in zip(rows, _by_channel(pixels), _by_channel(values), strict=True):
        np.take(row, bytes_, out=floats, mode="clip")  # the other modes make a copy first
    return values


def _by_channel(patches: npt.NDArray[T]) -> list[npt.NDArray[T]]:
    return np.split(patches, CHANNELS, axis=1)
