"""Measures from which size on a text travels faster through the object store than in the message.

    RAY_worker_niceness=0 python -m scripts.bench_payload [-n 200]

Uses the settings of Serve in serve_config.yaml. One replica sends a text in pieces to another, in a gRPC
message and by reference through Ray, alternating: pack, call through a handle, unpack, read every byte.
Prints medians of `n`. `loop` is the longest time for which the sender's event loop was blocked, which other
requests notice.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from unittest.mock import patch

import yaml
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.runtime import payload
from deployments.runtime.payload import pack_pieces, unpack_pieces
from deployments.types import Payload

ROOT = Path(__file__).parent.parent
KIB = 1024
SIZES = [size * KIB for size in (16, 64, 128, 256, 384, 512, 768, 1024, 2048)]  # gRPC's messages: up to 4 MiB
PIECE = 256 * KIB
WARM_UP = 20


class Receiver:
    async def read(self, payloads: list[Payload]) -> int:
        return sum(int(piece.max()) for piece in await unpack_pieces(payloads))


class Sender:
    def __init__(self, receiver: DeploymentHandle) -> None:
        self._receiver = receiver

    async def compare(self, num_bytes: int, n: int) -> list[tuple[float, float]]:
        """Medians (wall, loop) in ms: in the message, by reference."""
        times: list[list[tuple[float, float]]] = [[], []]
        for _ in range(n + WARM_UP):
            times[0].append(await self._send(num_bytes, inline_bytes=num_bytes))
            times[1].append(await self._send(num_bytes, inline_bytes=0))
        columns = [zip(*rows[WARM_UP:], strict=True) for rows in times]
        return [(statistics.median(wall), statistics.median(busy)) for wall, busy in columns]

    async def _send(self, num_bytes: int, inline_bytes: int) -> tuple[float, float]:
        pieces = [b"A" * min(PIECE, num_bytes - start) for start in range(0, num_bytes, PIECE)]
        with patch.object(payload, "INLINE_BYTES", inline_bytes):
            start = time.perf_counter()
            sending = asyncio.create_task(self._call(pieces, by_reference=inline_bytes == 0))
            busy = 0.0
            while not sending.done():
                turn = time.perf_counter()
                await asyncio.sleep(0)
                busy = max(busy, time.perf_counter() - turn)
            return (time.perf_counter() - start) * 1000, busy * 1000

    async def _call(self, pieces: list[bytes], by_reference: bool) -> None:
        read = self._receiver.options(_by_reference=by_reference).read
        assert await read.remote([await pack_pieces(pieces)]) == len(pieces) * ord("A")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=200)
    args = parser.parse_args()
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    replica = serve.deployment(ray_actor_options={"runtime_env": config["controller_options"]["runtime_env"]})
    handle = serve.run(replica(Sender).bind(replica(Receiver).bind()))
    print("KiB       in the message: wall  loop    by reference: wall  loop   (ms)")
    for size in SIZES:
        inline, ref = handle.compare.remote(size, args.n).result()
        print(f"{size // KIB:<8} {inline[0]:22.2f} {inline[1]:5.2f} {ref[0]:21.2f} {ref[1]:5.2f}", flush=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
