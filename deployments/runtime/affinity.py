"""Calls about the same content go to the same replica, where it may still be in a cache.

Best effort: nothing depends on it but how often work is done twice. The key of a call is its `session_id`,
as in `handle.options(session_id=digest).process.remote(...)`. (Not `multiplexed_model_id`: Serve's router
indexes waiting calls by that and forgets none of them before the same id comes again.)
"""

from __future__ import annotations

import random

from blake3 import blake3
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

# So many calls more than the least busy replica has may wait at the one that content belongs to.
MAX_IMBALANCE = 32


class AffinityRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """By rendezvous hashing: a replica that comes or goes moves only what it gets or had.

    Without a key, and where the replica of a key is too busy, the less busy of two takes the call, as Serve's
    own router does it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups in the order in which they are tried; of a group, the least busy replica is taken."""
        any_two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [any_two]
        pending_request.routing_context.should_backoff = True  # else a full queue is asked without a pause
        key = pending_request.metadata.session_id
        if not key or not candidate_replicas:
            return [any_two]
        owner = max(candidate_replicas, key=lambda replica: score(key, replica.replica_id.unique_id))
        return [[owner], any_two] if self._may_take(owner, candidate_replicas) else [any_two, [owner]]

    def _get_pending_request_matching_metadata(
        self, request_metadata: RequestMetadata | None = None
    ) -> PendingRequest | None:
        """Whose turn it is at the replica that was chosen for `request_metadata`: a call with the same key.

        Not by Serve's request id, which all calls of one request share.
        """
        key = request_metadata and request_metadata.session_id
        waiting = (p for p in self._pending_requests_to_fulfill if not p.future.done())
        return next((p for p in waiting if p.metadata.session_id == key), None) if key else None

    def _may_take(self, owner: RunningReplica, others: list[RunningReplica]) -> bool:
        waiting = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in (owner, *others)]
        return waiting[0] - min(waiting) < MAX_IMBALANCE


def score(key: str, replica: str) -> bytes:
    return blake3(f"{len(key)} {key}{replica}".encode()).digest(8)
