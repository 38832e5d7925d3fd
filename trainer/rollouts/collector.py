"""Starts as many groups as the pace allows, and returns batches that are fresh enough.

Invariants.
- Every index below the cursor is in exactly one place: running, waiting, consumed or dropped. `pending()` names the
  first two, so that a resumed run plays them again and consumes each exactly once.
- A group is played again under the same id and seed when the ring fails it, and dropped when it misses its deadline or
  its oldest token is too old. So is one whose version somebody has deleted: from what is sampled then is asked anew.
- A batch is ordered by index, not by arrival: with K = 0 the same run gives the same batches.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from shared.errors import ParallmError, SetupError, UnknownAdapterError
from trainer.rollouts.curriculum import Curriculum
from trainer.rollouts.episodes import Episodes
from trainer.rollouts.groups import IndexedSource, Lag, RolloutGroup
from trainer.rollouts.own.own_code import BlockedError
from trainer.rollouts.pacing import Pace, StaleWatch
from trainer.state import CurriculumBooks

log = structlog.get_logger()

_RETRIES = 8
BACKOFF_S = (0.2, 5.0)  # first pause, longest pause


class Collector(IndexedSource):
    """Runs groups in the background of an event loop; `adapter` gives the model that each one samples from."""

    def __init__(
        self,
        player: Episodes,
        pace: Pace,
        adapter: Callable[[], str],
        *,
        cursor: int = 0,
        pending: Sequence[int] = (),
        consumed: int = 0,
        watch: StaleWatch | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        super().__init__(cursor, consumed)
        self._player = player
        self._watch = watch or StaleWatch()
        self._pace = pace
        self._adapter = adapter
        self._curriculum = curriculum
        self._again = sorted(pending)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._before: set[int] = set()  # indices that were under way when another version was adopted
        self._steps_done = 0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    async def __aexit__(self, *_: object) -> None:
        """Cancel what is under way."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def next_batch(self, steps_done: int, lag: Lag) -> list[RolloutGroup]:
        """B groups, each fresh enough by `lag`; waits for them. Raises what made generation impossible."""
        self._steps_done = steps_done
        while True:
            if self._failure is not None:
                raise self._failure
            self._drop_stale(lag)
            self._fill()
            if len(self.waiting) >= self._pace.batch_groups:
                break
            self._changed.clear()
            await self._changed.wait()
        self.waiting.sort(key=lambda group: group.index)
        batch = self.waiting[: self._pace.batch_groups]
        del self.waiting[: len(batch)]
        self.consumed += len(batch)
        self._watch.used()
        return batch

    def learned(self, batch: Sequence[RolloutGroup]) -> None:
        """A train step has been made of a batch that was handed out: the curriculum counts its rewards."""
        if self._curriculum is not None:
            self._curriculum.learned([group.index for group in batch], [group.rewards for group in batch])

    def discard(self, batch: Sequence[RolloutGroup]) -> None:
        """A batch that was handed out taught nothing, because its policy is no more."""
        super().discard(batch)
        self._forget([group.index for group in batch])

    def adopted(self) -> None:
        """Continue from another version of the policy."""
        self._before = {*self._running, *(group.index for group in self.waiting)}

    def pace_on(self, steps_done: int) -> None:
        """A train step is done: more groups may start."""
        self._steps_done = steps_done
        self._fill()

    def pending(self) -> list[int]:
        """Indices that are started and neither consumed nor dropped."""
        return sorted([*self._again, *self._running, *super().pending()])

    def curriculum_books(self) -> CurriculumBooks | None:
        """State of the curriculum for a checkpoint; None when tasks follow one another."""
        return None if self._curriculum is None else self._curriculum.books(self.pending())

    def _fill(self) -> None:
        accepted = self.consumed + len(self.waiting)
        for _ in range(self._pace.capacity(self._steps_done, accepted, len(self._running))):
            index = self._next_index()
            if self._curriculum is not None:
                self._curriculum.draw(index)
            self._running[index] = asyncio.create_task(self._play(index), name=f"group {index}")

    def _next_index(self) -> int:
        if self._again:
            return self._again.pop(0)
        self.cursor += 1
        return self.cursor - 1

    async def _play(self, index: int) -> None:
        """One group, to its end; its place in the books changes without an await in between."""
        try:
            async with asyncio.timeout(self._pace.group_deadline_s):
                group = await self._play_until_done(index)
        except TimeoutError:
            log.warning("group.deadline", index=index, seconds=self._pace.group_deadline_s)
            self._give_up(index)
        except BlockedError as error:
            log.warning("group.blocked", index=index, reason=str(error))
            self._give_up(index)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Whatever an environment or the ring raises ends the run; the caller of next_batch gets it.
            del self._running[index]
            self._again.append(index)
            self._failure = error
        else:
            del self._running[index]
            judges = self._curriculum is None or self._curriculum.drawn(index).evenly
            self.waiting.append(group if judges else replace(group, judges=False))
        if self._failure is None:
            self._fill()
        self._changed.set()

    def _give_up(self, index: int) -> None:
        del self._running[index]
        self.dropped.append(index)
        if self._curriculum is not None:
            self._curriculum.failed(index)

    def _forget(self, indices: Sequence[int]) -> None:
        if self._curriculum is not None:
            self._curriculum.dropped(indices)

    async def _play_until_done(self, index: int) -> RolloutGroup:
        pause, longest = BACKOFF_S
        for attempt in itertools.count(1):
            try:
                return await self._player.play(index, self._adapter())
            except UnknownAdapterError as error:  # waits until the deletion is settled (`trainer.runs.foreign`)
                reason = str(error)
            except ParallmError as error:
                if attempt >= _RETRIES or error.status < 429 or isinstance(error, SetupError):
                    raise
                reason = str(error)
            log.warning("group.again", index=index, attempt=attempt, reason=reason)
            await asyncio.sleep(min(longest, pause * 2**attempt))
        raise AssertionError("unreachable")

    def _drop_stale(self, lag: Lag) -> None:
        ages = {group.index: lag(group) for group in self.waiting}
        old = [group for group in self.waiting if self._pace.too_old(ages[group.index])]
        if old:
            stale = [group.index for group in old]
            log.info("groups.stale", groups=len(stale), bound=self._pace.max_lag)
            if late := [group for group in old if group.index not in self._before]:
                self._watch.dropped(late, ages[late[-1].index])
            self.dropped += stale
            self._forget(stale)
            self.waiting = [group for group in self.waiting if group.index not in stale]
