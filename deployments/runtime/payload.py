"""Arrays on their way between processes: in the message where small, in the object store where large."""

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

# In the message up to here. Milliseconds from replica to replica, in a message of gRPC and by reference (see
# scripts/bench_payload.py): 64 KiB 4.0 / 8.7, 256 KiB 4.8 / 8.6, 384 KiB 4.6 / 8.8, 512 KiB 7.6 / 9.1, 1 MiB
# 10.4 / 9.9, 2 MiB 17.4 / 11.2. 512 KiB in a message hold up the sender's loop for 2.3 ms, 384 KiB for 1.1.
INLINE_BYTES = 384 * 1024


# Copies step back, as other heavy work does: at normal priority they took the core from event loops.
_COPYING = ThreadPoolExecutor(2, thread_name_prefix="copy", initializer=lower_priority, initargs=(19,))


def pack(arrays: Arrays) -> Payload:
    """Large arrays are copied once into the object store: not on an event loop, which the copy would stop."""
    nbytes = sum(array.nbytes for array in arrays.values())
    if nbytes <= INLINE_BYTES or not ray.is_initialized():
        return Payload(nbytes, inline=pickle.dumps(arrays, protocol=5))
    return Payload(nbytes, ref=ray.put(arrays))


async def unpack(payload: Payload | None) -> Arrays:
    """Arrays from the object store are read-only views that pin their object while they live.

    Raises ray.exceptions.RayError if the object is lost (its owner died).
    """
    assert payload is not None, "the arrays were left out"
    if payload.inline is not None:
        arrays: Arrays = pickle.loads(payload.inline)
        return arrays
    stored: Arrays = await payload.ref
    return stored


async def pack_pieces(pieces: Sequence[bytes]) -> Payload:
    """One text in pieces, as uint8[n] each: they are copied once, into the store, and not joined before."""
    arrays = {str(i): np.frombuffer(piece, np.uint8) for i, piece in enumerate(pieces)}
    if sum(map(len, pieces)) <= INLINE_BYTES:
        return pack(arrays)
    return await asyncio.get_running_loop().run_in_executor(_COPYING, pack, arrays)


async def unpack_pieces(payloads: Iterable[Payload]) -> list[npt.NDArray[np.uint8]]:
    """All pieces of a text, in order."""
    unpacked = await asyncio.gather(*map(unpack, payloads))
    return [piece for arrays in unpacked for piece in arrays.values()]
