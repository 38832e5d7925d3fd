"""The next work to train on: a batch of our own prompts, a batch of live traffic, or what a user has posted.

What stops the run from learning comes before all of it: somebody else has moved `latest`, or all samples are too old.

Invariant. One piece of work is handed out at a time; what was ready beside it goes back to where it came from, so that
a checkpoint between two train steps has every group either trained on or pending. Posted orders come first, then live
traffic, then our own prompts, whose generation goes on meanwhile.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import structlog

from shared.errors import SetupError
from shared.redis.training.orders import Received
from shared.training import Order
from trainer.ring.mailbox import RingMailbox
from trainer.rollouts.atropos import AtroposApi, AtroposCollector
from trainer.rollouts.collector import Collector
from trainer.rollouts.curriculum import Curriculum
from trainer.rollouts.environments import ArithmeticEnvironment, DatasetEnvironment, Environment, is_observation
from trainer.rollouts.episodes import EpisodeOptions, Episodes
from trainer.rollouts.groups import IndexedSource, Lag, RolloutGroup
from trainer.rollouts.live import LiveCollector
from trainer.rollouts.pacing import Pace, StaleWatch
from trainer.rollouts.task_places import Places, places_of
from trainer.rollouts.teaching import Teaching
from trainer.runs.parts import Parts
from trainer.settings import TrainSettings
from trainer.state import RunState

Source = Literal["prompts", "live", "posted"]

log = structlog.get_logger()


@dataclass(frozen=True)
class GroupBatch:
    """Groups for one train step."""

    groups: list[RolloutGroup]
    source: Source = "prompts"


@dataclass(frozen=True)
class Moved:
    """Another process has made another version the latest."""

    latest: int  # 0: the adapter was deleted


@dataclass(frozen=True)
class AllStale:
    """All that comes in is too old to learn from."""

    reason: str


Work = GroupBatch | Received[Order] | Moved | AllStale


class Inbox:
    """All sources of one run; unused ones are None."""

    def __init__(
        self,
        own: IndexedSource | None,
        live: LiveCollector | None,
        mailbox: RingMailbox,
        moved: Callable[[], Coroutine[Any, Any, Moved]],
        watches: Sequence[StaleWatch],
    ) -> None:
        self._own = own
        self._live = live
        self._mailbox = mailbox
        self._moved = moved
        self._watches = watches
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._own is not None:
            await self._stack.enter_async_context(self._own)
        if self._live is not None:
            await self._stack.enter_async_context(self._live)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def next(self, state: RunState, lag: Lag, stop: asyncio.Event) -> Work | None:
        """The next piece of work; None when the run was stopped meanwhile."""
        waiting: dict[str, asyncio.Task[Any]] = {"stop": _task(stop.wait()), "moved": _task(self._moved())}
        waiting |= {f"stale {number}": _task(watch.wait()) for number, watch in enumerate(self._watches)}
        waiting["order"] = _task(self._mailbox.next())
        if self._live is not None:
            waiting["live"] = _task(self._live.next_batch(lag))
        if self._own is not None:
            waiting["prompts"] = _task(self._own.next_batch(state.own_steps, lag))
        try:
            await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting.values():
                task.cancel()
            await asyncio.gather(*waiting.values(), return_exceptions=True)
            done = [name for name, task in waiting.items() if not task.cancelled() and task.exception() is None]
            for name in done[1:]:
                self._give_back(name, waiting[name].result())
        failed = [error for task in waiting.values() if not task.cancelled() and (error := task.exception())]
        if failed:
            raise failed[0]
        if done[0] == "stop":
            return None
        result = waiting[done[0]].result()
        if isinstance(result, Received | Moved):
            return result
        if done[0].startswith("stale"):
            self._watches[int(done[0].split()[1])].reported()
            return AllStale(result)
        return GroupBatch(result, "live" if done[0] == "live" else "prompts")

    def _give_back(self, name: str, work: Any) -> None:
        if name == "order":
            self._mailbox.give_back(work)
        elif name == "live" and self._live is not None:
            self._live.give_back(work)
        elif name == "prompts" and self._own is not None:
            self._own.give_back(work)

    def give_back(self, work: GroupBatch | Received[Order]) -> None:
        """Put work that was not used back, so that it is the next to be taken."""
        if isinstance(work, Received):
            self._give_back("order", work)
        else:
            self._give_back(work.source, work.groups)

    def discard(self, batch: GroupBatch) -> None:
        """A batch that was handed out taught nothing, because its policy is no more."""
        if batch.source == "prompts" and self._own is not None:
            self._own.discard(batch.groups)

    async def adopted(self) -> None:
        """Continue from another version than the ones that sampled pending groups."""
        if self._own is not None:
            self._own.adopted()
        if self._live is not None:
            await self._live.adopted()

    def pace_on(self, state: RunState, batch: GroupBatch) -> None:
        """A train step on this batch is done: more groups may start."""
        if self._own is not None:
            if batch.source == "prompts":
                self._own.learned(batch.groups)
            self._own.pace_on(state.own_steps)

    def take_dropped(self) -> tuple[list[int], int]:
        """Since the last call: indices of our own groups that were dropped, and how many groups in all."""
        own = self._own.take_dropped() if self._own is not None else []
        live = 0
        if self._live is not None:
            live = sum(self._live.dropped.values())
            self._live.dropped.clear()
        return own, len(own) + live

    def keep_books(self, state: RunState) -> None:
        """Write into the state what a checkpoint needs."""
        if self._own is not None:
            state.cursor, state.pending, state.consumed = self._own.cursor, self._own.pending(), self._own.consumed
            state.curriculum = self._own.curriculum_books()
        if self._live is not None:
            state.taken, state.live = list(self._live.taken), self._live.books

    async def saved(self) -> None:
        """A checkpoint with these books is on disk."""
        if self._live is not None:
            await self._live.saved()
        await self._mailbox.saved()


def _task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(work)


ENDLESS = 1024  # tasks of a curriculum whose environment has no end
_AT_ONCE = 64  # tasks that are asked how hard they are


async def open_curriculum(settings: TrainSettings, environment: Environment, books: RunState) -> Curriculum | None:
    """Curriculum over the run's own tasks, in the state that a checkpoint has; None: tasks follow one another."""
    options = settings.curriculum_options(settings.seed)
    if options.name == "uniform":
        return None
    ends = isinstance(environment, ArithmeticEnvironment | DatasetEnvironment) and environment.count
    tasks = ends or settings.task_count or ENDLESS
    places = await _places(environment, tasks) if settings.difficulty_field() is not None else None
    identity = await asyncio.to_thread(_identity, settings, tasks, places)
    curriculum = await asyncio.to_thread(Curriculum, options, tasks, places, identity)
    if books.curriculum is not None and not curriculum.restore(books.curriculum):
        log.warning("curriculum.begun_anew", reason="the checkpoint's is of other tasks, or of another kind")
    return curriculum


async def _places(environment: Environment, tasks: int) -> Places:
    difficulties: list[float] = []
    for first in range(0, tasks, _AT_ONCE):
        asked = (environment.reset(task) for task in range(first, min(first + _AT_ONCE, tasks)))
        for given in await asyncio.gather(*asked):
            difficulty = is_observation(environment.name, given).difficulty
            if difficulty is None:
                raise SetupError(
                    f"--curriculum difficulty: task {len(difficulties)} of {environment.name!r} has no difficulty; "
                    "`reset` gives it as `Observation(difficulty=...)`"
                )
            difficulties.append(float(difficulty))
    return await asyncio.to_thread(places_of, difficulties)


def _identity(settings: TrainSettings, tasks: int, places: Places | None) -> str:
    """Hash by which a checkpoint's curriculum state is recognised as being of these tasks and options."""
    named = [settings.curriculum, settings.curriculum_field, settings.curriculum_levels, settings.task, tasks]
    named += [settings.curriculum_hopeless, settings.curriculum_solved, settings.reward, settings.reward_options]
    told = json.dumps([*named, settings.task_options, settings.seed], sort_keys=True, default=str)
    read = _digest(settings.dataset) if settings.dataset else b""
    return hashlib.sha256(told.encode() + read + (b"" if places is None else places.tobytes())).hexdigest()


def _digest(path: Path) -> bytes:
    with path.open("rb") as lines:
        return hashlib.file_digest(lines, "sha256").digest()


def open_inbox(
    settings: TrainSettings,
    parts: Parts,
    books: RunState,
    start: str,
    sampled_from: Callable[[], str],
    moved: Callable[[], Coroutine[Any, Any, Moved]],
    curriculum: Curriculum | None,
) -> Inbox:
    """All sources of a run. `start`: an id of this start of it; `sampled_from`: the version that a new group is of.

    Ids of groups are new at each start: what a ring still holds of the last one may be sampled from versions that are
    no more.
    """
    own_watch = StaleWatch("samples", 2 * settings.prompts_per_step * settings.group_size, settings.max_lag)
    live_watch = StaleWatch("live trajectories", 2 * settings.live_trajectories, settings.live_max_lag)
    own: IndexedSource | None = None
    live: LiveCollector | None = None
    if settings.atropos_url:
        api = AtroposApi(settings.atropos_url, trouble=parts.ring.board.note)
        registration = settings.registration(books.train_step)
        own = AtroposCollector(api, registration, books.cursor, books.consumed, books.pending)
    elif settings.source in ("prompts", "both"):
        own = _prompts(settings, parts, books, start, sampled_from, own_watch, curriculum)
    if settings.source in ("live", "both"):
        if parts.ring.live is None:
            raise SetupError(f"source {settings.source!r} needs a ring with live traffic")
        per_step, max_lag, deadline_s = settings.live_trajectories, settings.live_max_lag, settings.group_deadline_s
        live = LiveCollector(parts.ring.live, per_step, max_lag, deadline_s, books.taken, live_watch, books.live)
    return Inbox(own, live, parts.ring.mailbox, moved, (own_watch, live_watch))


def _prompts(
    settings: TrainSettings,
    parts: Parts,
    books: RunState,
    start: str,
    sampled_from: Callable[[], str],
    watch: StaleWatch,
    curriculum: Curriculum | None,
) -> Collector:
    run, sampling = f"{books.run}-{start}", settings.sampling()
    options = EpisodeOptions(run, settings.group_size, sampling, settings.max_turns, settings.seed)
    scorer, teacher = parts.ring.scorer, settings.teacher
    teaching = None if scorer is None else Teaching(scorer, parts.conversation, teacher)
    return Collector(
        Episodes(parts.ring.source, parts.environment, parts.conversation, options, curriculum, teaching),
        Pace(settings.prompts_per_step, settings.max_lag, settings.group_deadline_s),
        sampled_from,
        cursor=books.cursor,
        pending=books.pending,
        consumed=books.consumed,
        watch=watch,
        curriculum=curriculum,
    )
