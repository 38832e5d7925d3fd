"""How a worker of a group starts and ends: its engine, and the other ranks with theirs."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from shared.process.loops import cancel
from worker.engine.model.loader import LoadedModel
from worker.engine.thread import EngineThread
from worker.group.lead import GroupLead


async def started(engine: EngineThread, group: GroupLead | None, stop: asyncio.Event) -> LoadedModel | None:
    """An engine's model, once it is loaded, on all ranks of its group if it has one.

    None: it is told to stop before the others are there, who may never come.
    """
    if group is None:
        return await asyncio.to_thread(engine.start)
    stopping = asyncio.create_task(stop.wait())
    opening = asyncio.create_task(group.open(engine.wake_up))
    try:
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            await cancel([opening])
            await group.close()
            return None
        opening.result()
        return await group.unless_lost(asyncio.wrap_future(engine.begin()))
    except BaseException as error:
        await group.close(error)
        raise
    finally:
        stopping.cancel()


async def prepared(work: Callable[[], None], group: GroupLead | None) -> None:
    """Do what blocks before the worker is ready, unless a rank is lost meanwhile: see `GroupLead.unless_lost`.

    In a thread that nobody waits for at the end: with a rank lost it may be in a sum that never ends.
    """
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="prepare", daemon=True).start()
    waits = asyncio.wrap_future(done)
    if group is None:
        return await waits
    try:
        await group.unless_lost(waits)
    except BaseException as error:
        await group.close(error)
        raise


async def ended(group: GroupLead | None) -> None:
    """Let the other ranks end, if there are any."""
    if group is not None:
        await group.close()
