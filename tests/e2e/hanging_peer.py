"""A real worker process that stops in the middle of a transfer of KV, for somebody to kill it there.

`python -m tests.e2e.hanging_peer ARGUMENTS OF mlx_parallm_worker`.
"""

import asyncio
import sys

from mlx_model import fast_blas

fast_blas.install()

from shared.wire import Connection  # noqa: E402
from worker import __main__ as command  # noqa: E402
from worker.peers import client, listening  # noqa: E402

HANGS = "peer.hangs"
LARGE = 50_000  # bytes; only KV has so many in one piece


class HangingConnection(Connection):
    """Half of some KV comes through."""

    async def read(self, size: int) -> bytearray:
        if size < LARGE:
            return await super().read(size)
        await super().read(size // 2)
        return await hang()

    async def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if view.nbytes < LARGE:
            await super().write(data)
            return
        await super().write(view.cast("B")[: view.nbytes // 2])
        await hang()


async def hang() -> bytearray:
    print(HANGS, flush=True)
    await asyncio.Event().wait()
    return bytearray()


client.Connection = listening.Connection = HangingConnection  # type: ignore[misc]
if __name__ == "__main__":
    sys.exit(command.main())
