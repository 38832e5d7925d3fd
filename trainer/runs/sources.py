"""The sources of a run, as its settings name them, each where the run's books say that it stands."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog

from shared.errors import SetupError
from trainer.rollouts.atropos import AtroposApi, AtroposCollector
from trainer.rollouts.collector import Collector
from trainer.rollouts.curriculum import Curriculum
from trainer.rollouts.environments import ArithmeticEnvironment, DatasetEnvironment, Environment, is_observation
from trainer.rollouts.episodes import EpisodeOptions, Episodes
from trainer.rollouts.groups import IndexedSource
from trainer.rollouts.live import LiveCollector
from trainer.rollouts.pacing import Pace, StaleWatch
from trainer.rollouts.task_places import Places, places_of
from trainer.runs.inbox import Inbox, Moved
from trainer.runs.parts import Parts
from trainer.settings import TrainSettings
from trainer.state import RunState

log = structlog.get_logger()

ENDLESS = 1024  # tasks of a curriculum whose environment has no end
_AT_ONCE = 64  # tasks that are asked how hard they are


async def open_curriculum(settings: TrainSettings, environment: Environment, books: RunState) -> Curriculum | None:
    """What chooses among the run's own tasks, where its books stand; None: they follow one another."""
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
    """By what a checkpoint's books are known to be of these tasks and of this kind of curriculum."""
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
        live = LiveCollector(parts.ring.live, per_step, max_lag, deadline_s, books.taken, live_watch)
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
    return Collector(
        Episodes(parts.ring.source, parts.environment, parts.conversation, options, curriculum),
        Pace(settings.prompts_per_step, settings.max_lag, settings.group_deadline_s),
        sampled_from,
        cursor=books.cursor,
        pending=books.pending,
        consumed=books.consumed,
        watch=watch,
        curriculum=curriculum,
    )
