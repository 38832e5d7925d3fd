"""How a worker of a group starts and ends: its engine, and the other ranks with theirs."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from mlx_model.loader import LoadedModel
from ranks.lead import GroupLead
from shared.process.loops import cancel
from worker.engine.thread import EngineThread

T = TypeVar("T")


async def started(engine: EngineThread, group: GroupLead | None, stop: asyncio.Event) -> LoadedModel | None:
    """An engine's model, once it is loaded, on all ranks of its group if it has one.

    None if `stop` is set before: the others may never come.
    """
    if group is None:
        return await asyncio.to_thread(engine.start)

    async def load() -> LoadedModel:
        await group.open(engine.wake_up)
        return await group.unless_lost(asyncio.wrap_future(engine.begin()))

    return await _unless_stopped(load(), group, stop)


async def joined(work: Awaitable[None], group: GroupLead | None, stop: asyncio.Event) -> bool:
    """Wait until the ring knows the worker, which a Redis that is away puts off; False if `stop` is set before."""

    async def wait() -> bool:
        await (work if group is None else group.unless_lost(work))
        return True

    return await _unless_stopped(wait(), group, stop) is not None


async def _unless_stopped(work: Coroutine[Any, Any, T], group: GroupLead | None, stop: asyncio.Event) -> T | None:
    """Result of `work`, None if `stop` is set before; without a result the other ranks end."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() or (group is not None and group.lost):  # a rank's loss stops us, too: `work` is to say so
            return await working
        await cancel([working])
        await ended(group)
        return None
    except BaseException as error:
        working.cancel()
        if group is not None:
            await group.close(error)
        raise
    finally:
        stopping.cancel()


async def ended(group: GroupLead | None) -> None:
    """Let the other ranks end, if there are any."""
    if group is not None:
        await group.close()
