"""Routes calls about the same content to the same replica, whose cache may still have it.

This is best effort: it only saves repeated work. The key of a call is its `session_id`, as in
`handle.options(session_id=digest).process.remote(...)`. (`multiplexed_model_id` would leak: Serve's router
indexes waiting calls by it, and forgets them only when the same id comes again.)
"""

from __future__ import annotations

import random

from blake3 import blake3
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

# The owner of a key may have up to this many calls more than the least busy replica.
MAX_IMBALANCE = 32


class AffinityRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Finds the owner of a key by rendezvous hashing: a new or lost replica moves only its own keys.

    A call without a key, or whose owner is too busy, goes to the less busy of two random replicas, as with
    Serve's own router.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns groups of replicas in the order of trial. Serve takes the least busy one of a group."""
        any_two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [any_two]
        pending_request.routing_context.should_backoff = (
            True  # otherwise a full queue is polled without a pause
        )
        key = pending_request.metadata.session_id
        if not key or not candidate_replicas:
            return [any_two]
        owner = max(candidate_replicas, key=lambda replica: score(key, replica.replica_id.unique_id))
        return [[owner], any_two] if self._may_take(owner, candidate_replicas) else [any_two, [owner]]

    def _get_pending_request_matching_metadata(
        self, request_metadata: RequestMetadata | None = None
    ) -> PendingRequest | None:
        """Returns the waiting call that gets the replica chosen for `request_metadata`: one with the same
        key.

        Serve itself matches by request id, which all calls of one request share.
        """
        key = request_metadata and request_metadata.session_id
        waiting = (p for p in self._pending_requests_to_fulfill if not p.future.done())
        return next((p for p in waiting if p.metadata.session_id == key), None) if key else None

    def _may_take(self, owner: RunningReplica, others: list[RunningReplica]) -> bool:
        waiting = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in (owner, *others)]
        return waiting[0] - min(waiting) < MAX_IMBALANCE


def score(key: str, replica: str) -> bytes:
    return blake3(f"{len(key)} {key}{replica}".encode()).digest(8)
