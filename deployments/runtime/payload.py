"""Packs arrays for other processes: small ones into the message, large ones into the object store."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import ray

from deployments.runtime.pool import lower_priority
from deployments.types import Arrays, Payload

# The largest arrays that travel in a message. Milliseconds from replica to replica, in a gRPC message / by
# reference (scripts/bench_payload.py): 64 KiB 4.0 / 8.7, 256 KiB 4.8 / 8.6, 384 KiB 4.6 / 8.8, 512 KiB 7.6 /
# 9.1, 1 MiB 10.4 / 9.9, 2 MiB 17.4 / 11.2. A message of 512 KiB blocks the sender's loop for 2.3 ms, 384 KiB
# for 1.1.
INLINE_BYTES = 384 * 1024


# Copies run at low priority, as other heavy work does: otherwise they would take the core from event loops.
_COPYING = ThreadPoolExecutor(2, thread_name_prefix="copy", initializer=lower_priority, initargs=(19,))


def pack(arrays: Arrays) -> Payload:
    """Packs arrays. Large ones are copied into the object store, so do not call this on an event loop."""
    nbytes = sum(array.nbytes for array in arrays.values())
    if nbytes <= INLINE_BYTES or not ray.is_initialized():
        return Payload(nbytes, inline=pickle.dumps(arrays, protocol=5))
    return Payload(nbytes, ref=ray.put(arrays))


async def unpack(payload: Payload | None) -> Arrays:
    """Returns the arrays. Those from the object store are read-only views that pin their object.

    Raises ray.exceptions.RayError if the object is lost (its owner died).
    """
    assert payload is not None, "the arrays were left out"
    if payload.inline is not None:
        arrays: Arrays = pickle.loads(payload.inline)
        return arrays
    stored: Arrays = await payload.ref
    return stored


async def pack_pieces(pieces: Sequence[bytes]) -> Payload:
    """Packs a text in pieces as uint8[n] each. They are copied into the store without being joined."""
    arrays = {str(i): np.frombuffer(piece, np.uint8) for i, piece in enumerate(pieces)}
    if sum(map(len, pieces)) <= INLINE_BYTES:
        return pack(arrays)
    return await asyncio.get_running_loop().run_in_executor(_COPYING, pack, arrays)


async def unpack_pieces(payloads: Iterable[Payload]) -> list[npt.NDArray[np.uint8]]:
    """Returns all pieces of a text in order."""
    unpacked = await asyncio.gather(*map(unpack, payloads))
    return [piece for arrays in unpacked for piece in arrays.values()]
