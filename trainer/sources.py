"""The sources of a run, as its settings name them, each where the run's books say that it stands."""

from collections.abc import Callable, Coroutine
from typing import Any

from shared.errors import SetupError
from trainer.inbox import Inbox, Moved, OwnSource
from trainer.rollouts.atropos import AtroposApi, AtroposCollector
from trainer.rollouts.collector import Collector
from trainer.rollouts.episodes import EpisodeOptions, Episodes
from trainer.rollouts.live import LiveCollector
from trainer.rollouts.staleness import StaleWatch
from trainer.seams import Parts
from trainer.settings import TrainSettings
from trainer.state import RunState


class Sources:
    """Opens the inbox of a run. `start`: an id of this start of it.

    Ids of groups are new at each start: what a ring still holds of the last one may be sampled from versions that are
    no more.
    """

    def __init__(self, settings: TrainSettings, parts: Parts, books: RunState, start: str) -> None:
        self._settings = settings
        self._parts = parts
        self._books = books
        self._start = start

    def inbox(self, sampled_from: Callable[[], str], moved: Callable[[], Coroutine[Any, Any, Moved]]) -> Inbox:
        """All sources. `sampled_from`: the version that a group that starts now is sampled from."""
        settings = self._settings
        own_watch = StaleWatch("samples", 2 * settings.prompts_per_step * settings.group_size, settings.max_lag)
        live_watch = StaleWatch("live trajectories", 2 * settings.live_trajectories, settings.live_max_lag)
        own, live = self._own(sampled_from, own_watch), self._live(live_watch)
        return Inbox(own, live, self._parts.mailbox, moved, (own_watch, live_watch))

    def _own(self, sampled_from: Callable[[], str], watch: StaleWatch) -> OwnSource | None:
        settings, parts, books = self._settings, self._parts, self._books
        if settings.atropos_url:
            return AtroposCollector(
                AtroposApi(settings.atropos_url),
                settings.registration(books.train_step),
                cursor=books.cursor,
                pending=books.pending,
                consumed=books.consumed,
            )
        if settings.source not in ("prompts", "both"):
            return None
        options = EpisodeOptions(
            f"{books.run}-{self._start}", settings.group_size, settings.sampling(), settings.max_turns, settings.seed
        )
        return Collector(
            Episodes(parts.source, parts.environment, parts.conversation, options),
            settings.pace(),
            sampled_from,
            cursor=books.cursor,
            pending=books.pending,
            consumed=books.consumed,
            watch=watch,
        )

    def _live(self, watch: StaleWatch) -> LiveCollector | None:
        settings = self._settings
        if settings.source not in ("live", "both"):
            return None
        if self._parts.live is None:
            raise SetupError(f"source {settings.source!r} needs a ring with live traffic")
        return LiveCollector(
            self._parts.live,
            settings.live_trajectories,
            settings.live_max_lag,
            settings.group_deadline_s,
            self._books.taken,
            watch,
        )
