"""The sources of a run, as its settings name them, each where the run's books say that it stands."""

from collections.abc import Callable, Coroutine
from typing import Any

from shared.errors import SetupError
from trainer.inbox import Inbox, Moved
from trainer.parts import Parts
from trainer.rollouts.atropos import AtroposApi, AtroposCollector
from trainer.rollouts.collector import Collector
from trainer.rollouts.episodes import EpisodeOptions, Episodes
from trainer.rollouts.groups import IndexedSource
from trainer.rollouts.live import LiveCollector
from trainer.rollouts.pacing import Pace, StaleWatch
from trainer.settings import TrainSettings
from trainer.state import RunState


def open_inbox(
    settings: TrainSettings,
    parts: Parts,
    books: RunState,
    start: str,
    sampled_from: Callable[[], str],
    moved: Callable[[], Coroutine[Any, Any, Moved]],
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
        api, registration = AtroposApi(settings.atropos_url), settings.registration(books.train_step)
        own = AtroposCollector(api, registration, books.cursor, books.consumed, books.pending)
    elif settings.source in ("prompts", "both"):
        own = _prompts(settings, parts, books, start, sampled_from, own_watch)
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
) -> Collector:
    run, sampling = f"{books.run}-{start}", settings.sampling()
    options = EpisodeOptions(run, settings.group_size, sampling, settings.max_turns, settings.seed)
    return Collector(
        Episodes(parts.ring.source, parts.environment, parts.conversation, options),
        Pace(settings.prompts_per_step, settings.max_lag, settings.group_deadline_s),
        sampled_from,
        cursor=books.cursor,
        pending=books.pending,
        consumed=books.consumed,
        watch=watch,
    )
