"""Content digests: equal digests mean equal content, even for content that a client chose."""

from __future__ import annotations

from blake3 import blake3


def digest(*parts: str | bytes | memoryview) -> str:
    """Returns the BLAKE3 of the parts as 64 hex characters.

    Every part is preceded by its length, so that no two lists of parts give the same bytes. The GIL is
    released while large parts are hashed.
    """
    hasher = blake3()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(memoryview(data).nbytes.to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()
