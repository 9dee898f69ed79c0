"""Arrays on their way between processes: in the message where small, in the object store where large."""

from __future__ import annotations

import asyncio
import pickle

import ray

from deployments.types import Arrays, Payload

# Up to here a copy through the messages is cheaper than a put and a get.
INLINE_BYTES = 256 * 1024


async def pack(arrays: Arrays) -> Payload:
    """Large arrays are copied once into the object store, in a thread: the copy must not stop the loop."""
    nbytes = sum(array.nbytes for array in arrays.values())
    if nbytes <= INLINE_BYTES or not ray.is_initialized():
        return Payload(nbytes, inline=pickle.dumps(arrays, protocol=5))
    return Payload(nbytes, ref=await asyncio.to_thread(ray.put, arrays))


async def unpack(payload: Payload) -> Arrays:
    """Arrays from the object store are read-only views that pin their object while they live.

    Raises ray.exceptions.RayError if the object is lost (its owner died).
    """
    if payload.inline is not None:
        arrays: Arrays = pickle.loads(payload.inline)
        return arrays
    stored: Arrays = await payload.ref
    return stored
