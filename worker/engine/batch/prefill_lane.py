"""A prefill lane apart from the batch's: prompts that are scored or embedded, those that rows share, and networks.

A task runs in chunks between decode steps. Logits of a chunk are reduced to log-probabilities at once: [L, V] of a
long prompt never exists in one piece. What a task leaves is its KV, for the rows that fork from it, and the
log-probabilities of the ids that it was asked about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_model.pooling import Pool
from mlx_model.sampling.draw import most_likely, top_lists
from mlx_model.sampling.prompt_tokens import asked_from, others, report_prompt, wants_others
from shared.errors import EngineError, ParallmError, UnsupportedModelError
from shared.frames import Finish, TokenEvent, TokenLogprobs
from shared.sequences import SequenceClass
from worker.engine.batch.adapters import Adapters
from worker.engine.batch.keeping import Keeping
from worker.engine.batch.network_run import NetworkRows, is_spent
from worker.engine.batch.parted_batch import PartedBatch
from worker.engine.batch.prompt_group import Entry
from worker.engine.batch.prompts_in_flight import Pieces
from worker.engine.batch.row import Row, RowTag, tenants_of
from worker.engine.batch.row_model import RowModel
from worker.engine.batch.running_batch import RunningBatch
from worker.engine.prefixes.entries import UNASKED
from worker.engine.prefixes.prefix_cache import PrefixCache
from worker.engine.prefixes.slabs import KvRows
from worker.engine.scheduler import widest

log = logging.getLogger(__name__)

MOST_TOGETHER = 32  # texts that heads read in one forward


@dataclass
class PrefillTask:
    """One prompt. `ids[1 + n]`, n >= `score_from`, get a log-probability; the KV covers all but the last id."""

    rows: list[Row]
    ids: list[int]
    score_from: int  # len(ids) - 1: score nothing
    adapter: str = ""  # rows of equal adapters compute the same KV
    top_count: int = 0
    done: int = 0  # ids that are in the KV
    cached: int = 0  # of them, ids whose KV came from the prefix cache
    kv: list[Any] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)  # `done` at which states are stored; in order
    kv_versions: set[str] = field(default_factory=set)  # that the KV has been computed with
    logprobs: list[float] = field(default_factory=list)  # of ids[1 + score_from :]
    top_logprobs: list[TokenLogprobs] = field(default_factory=list)
    others: dict[Row, list[TokenLogprobs]] = field(default_factory=dict)  # that a row asks about in their places
    pool: Pool | None = None  # of an embedding: then all ids are fed, and nothing is scored
    outputs: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # of the heads that have read it, by name
    network: NetworkRows | None = None  # in the place of a prompt

    def __post_init__(self) -> None:
        kept: str = "" if self.pool is None else self.pool.pooling
        if self.network is not None:
            kept = f"network {self.rows[0].spec.id}"  # no two are the same
        # Tasks of equal keys have the same KV, and may all store it or none.
        self.key = (tuple(self.ids), self.adapter, kept, self.rows[0].spec.cache, self.rows[0].spec.fresh)
        self.reports = any(row.spec.kind != "generate" or wants_prompt_logprobs(row) for row in self.rows)

    @property
    def sequence_class(self) -> SequenceClass:
        """Interactive as soon as one row is."""
        return "batch" if all(row.spec.sequence_class == "batch" for row in self.rows) else "interactive"

    @property
    def left(self) -> int:
        """Ids that still have to be fed; of a network 1 until it is over."""
        if self.network is not None:
            return int(self.network.outcome is None)
        return len(self.ids) - (self.pool is None) - self.done

    def from_cache(self, most: int) -> int:
        """Number of ids whose KV may come from the cache, at most `most`."""
        return 0 if self.rows[0].spec.fresh else most

    def entry(self, version: str, prefixes: PrefixCache) -> Entry:
        """For the batch, to prefill what is not cached."""
        prefix = prefixes.longest(self.ids, version, self.from_cache(len(self.ids) - 1), tenants_of(self.rows))
        for row in self.rows:
            row.take_kv(prefix.length, {version} if prefix.length else set())
        stops = prefixes.snapshot_positions(self.ids, version, prefix.length)
        return Entry(list(self.rows), self.ids[prefix.length :], prefix.kv or None, prefix.length, stops)


def task_for(row: Row, adapter: str = "") -> PrefillTask:
    """The task that a row needs: a score, its prompt's log-probabilities, or only KV to fork from."""
    ids = row.context
    if row.spec.kind == "network":
        return PrefillTask([row], ids, 0, adapter, network=NetworkRows(row))
    if row.spec.kind in ("embed", "head"):
        return PrefillTask([row], ids, 0, adapter, pool=Pool("last" if row.spec.kind == "head" else row.spec.pooling))
    if wants_prompt_logprobs(row):
        return PrefillTask([row], ids, asked_from(row.spec), adapter, row.sampling.prompt_logprobs or 0)
    score_from = len(row.spec.prompt_ids) - 1 if row.spec.kind == "score" else len(ids) - 1
    return PrefillTask([row], ids, score_from, adapter)


def promote(row: Row, adapters: Adapters, prefixes: PrefixCache) -> None:
    """Have KV brought to memory that a row could start from, once, as soon as its version is known."""
    version = adapters.version(row)
    if row.spec.kind != "network" and row.promotion is UNASKED and (version or not row.spec.adapter):
        task = task_for(row)
        row.promotion = prefixes.promotion(row.context, version, task.from_cache(task.score_from))


def wants_prompt_logprobs(row: Row) -> bool:
    """Asked for, and not already sent by an earlier attempt."""
    return row.sampling.prompt_logprobs is not None and all(event.prompt_logprobs is None for event in row.prior)


class PrefillLane:
    """Tasks in order of arrival; the first one of each class runs."""

    def __init__(
        self,
        model: RowModel,
        prefixes: PrefixCache,
        keeping: Keeping,
        score_positions: int,
        pieces: Pieces,
        begun: Callable[[Row, Sequence[Any]], tuple[list[Any], int] | None],
    ) -> None:
        """`begun`: as `RunningBatch` has it, by which prompts read what they have in common with others."""
        self._begun = begun
        self._model = model
        self._prefixes = prefixes
        self._keeping = keeping
        self._score_positions = score_positions  # positions whose logits may exist at one time
        self._pieces = pieces
        self._tasks: list[PrefillTask] = []
        self._spent = -1.0  # the turn that has no more time for networks

    @property
    def waiting(self) -> set[SequenceClass]:
        """The classes of the tasks."""
        return {task.sequence_class for task in self._tasks}

    def first(self, of: SequenceClass) -> PrefillTask | None:
        """The running task of a class: a network while the turn has time for one, else the first prompt."""
        tasks = [task for task in self._tasks if task.sequence_class == of]
        has_time = self._spent != self._pieces.opened
        networks = (task for task in tasks if task.network is not None and (has_time or not task.left))
        return next(networks, None) or next((task for task in tasks if task.network is None), None)

    def has_begun(self, of: SequenceClass) -> bool:
        """True if the running task of a class has KV."""
        return (task := self.first(of)) is not None and bool(task.kv)

    def add(self, task: PrefillTask) -> None:
        """Queue a task, or join an equal one."""
        if other := self._joinable(task):
            other.rows += task.rows
            other.score_from = min(other.score_from, task.score_from)
            other.top_count = max(other.top_count, task.top_count)
            return
        self._tasks.append(task)

    def has_equal(self, task: PrefillTask) -> bool:
        """True if `task` would join another."""
        return self._joinable(task) is not None

    def _joinable(self, task: PrefillTask) -> PrefillTask | None:
        """An equal task; what it has fed already cannot be scored any more."""
        equal = (other for other in self._tasks if other.key == task.key)
        return next((other for other in equal if other.done == 0 or not task.reports), None)

    def remove(self, row: Row) -> None:
        """Forget a row, and its task when no other row waits for it."""
        for task in self._tasks:
            if row in task.rows:
                task.rows.remove(row)
                if not task.rows:
                    self._tasks.remove(task)
                return

    def reports(self, task: PrefillTask) -> list[tuple[Row, TokenEvent]]:
        """One event per row of a complete task: log-probabilities, score, embedding, head output or nothing."""
        return [(row, self._report(task, row)) for row in task.rows]

    def _report(self, task: PrefillTask, row: Row) -> TokenEvent:
        prompt = len(row.spec.prompt_ids)
        event = TokenEvent(row.spec.id, row.attempt, row.start, [], [])
        if wants_prompt_logprobs(row):
            report_prompt(event, row.spec, task.score_from, task.logprobs, task.top_logprobs, task.others.get(row))
        if row.spec.kind == "score":
            event.score_logprobs = task.logprobs[prompt - 1 - task.score_from :]
            event.finish = Finish("stop", cached_tokens=row.cached_tokens)
        elif task.network is not None:
            event.version = self._model.adapters.version(row)
            event.embedding, event.finish = task.network.report()
        elif row.spec.kind == "head":
            event.version = self._model.adapters.version(row)
            event.embedding, event.finish = self._read(task, row)
        elif task.pool is not None:
            event.embedding, event.finish = task.pool.result(), Finish("stop")
        return event

    def _read(self, task: PrefillTask, row: Row) -> tuple[bytes | None, Finish]:
        """Compute the head's output for a row; an error ends this row alone."""
        name = row.spec.head
        try:
            if name not in task.outputs:
                self._read_together(task, row)
            if np.isfinite(task.outputs[name]).all():
                return task.outputs[name].tobytes(), Finish("stop")
            raise UnsupportedModelError(f"what head {name!r} says of this text is no finite number", param="model")
        except ParallmError as error:
            return None, Finish.failed(error)
        except Exception as error:
            log.exception("engine.head_failed seq=%s", row.spec.id)
            return None, Finish.failed(EngineError(f"head {name!r}: {type(error).__name__}: {error}"))

    def _read_together(self, task: PrefillTask, row: Row) -> None:
        """Read a text, and those that wait for the same head of the same version, all at once."""
        name, head = row.spec.head, self._model.head(row)
        others = [] if self._model.is_apart else self._tasks
        tasks = [task, *(other for other in others if _waits_for(other, name, task.adapter))]
        states_NH = mx.stack([each.pool.vector_H for each in tasks if each.pool is not None])
        for each, outputs_O in zip(tasks, head(states_NH), strict=True):
            each.outputs[name] = outputs_O

    def give_up(self) -> list[Row]:
        """The rows of tasks that have begun, which are forgotten: what they wait for cannot be computed."""
        begun = [task for task in self._tasks if task.kv]
        self._tasks = [task for task in self._tasks if not task.kv]
        return [row for task in begun for row in task.rows]

    def take_out(self, task: PrefillTask) -> None:
        """It is complete, or failed."""
        self._tasks.remove(task)

    def feed(self, task: PrefillTask, budget: int) -> int:
        """Run one chunk of a task, at most `budget` ids; its length, 0 of a network."""
        if task.network is not None:
            self._compute(task, task.network)
            return 0
        if task.pool is not None and not task.done and (tasks := self._together(task, budget)):
            return self._embed_together(tasks)
        if task.pool is not None and not task.left:
            return 0
        if not task.kv:
            self._begin(task)
        length = int(min(budget, task.left, widest(task.done, self._pieces.area)))
        if length == 0:
            self._keep(task)
            return 0
        if task.pool is not None:
            self._embed(task, task.pool, length)
            return length
        scores = task.done >= task.score_from
        length = min(length, self._score_positions if scores else task.score_from - task.done)
        length = min([length, *(stop - task.done for stop in task.stops if stop > task.done)])
        ids = task.ids[task.done : task.done + length]
        logits_1LV = self._model.feed([ids], [task.done], [*task.kv, RowTag((task.rows[0],))])
        task.kv_versions.update(self._model.versions)
        if scores:
            targets = task.ids[task.done + 1 : task.done + length + 1]
            each = 1 if self._model.is_apart else length  # one at a time, as they are drawn
            for at in range(0, length, each):
                _collect(task, logits_1LV[0, at : at + each], targets[at : at + each], task.done + at)
        self._fed(task, length)
        self._keep(task)
        return length

    def _keep(self, task: PrefillTask) -> None:
        """Store what is worth it by now."""
        row = task.rows[0]
        row.kv_versions |= task.kv_versions
        if task.done in task.stops:
            self._keeping.at_stops([row], [task.done], lambda _: KvRows.of(task.kv))
        if not task.left:
            self._keeping.prompt(row, task.done, lambda _: KvRows.of(task.kv))

    def set_aside(self, rows: Iterable[Row]) -> None:
        """Keep the KV of prompts that are half fed: these rows go on later, or elsewhere."""
        gone = set(rows)
        for task in self._tasks:
            if task.done and task.pool is None and gone.intersection(task.rows):
                task.rows[0].kv_versions |= task.kv_versions
                self._set_aside(task)

    def _set_aside(self, task: PrefillTask) -> None:
        self._keeping.at_stops(task.rows[:1], [task.done], lambda _: KvRows.of(task.kv))

    def _compute(self, task: PrefillTask, network: NetworkRows) -> None:
        if task.left:
            opened = self._pieces.opened
            self._pieces.ignore()
            network.advance(self._model, self._of_its_version(task), opened)
            if task.left or self._model.is_divided or is_spent(opened):
                self._spent = opened

    def _of_its_version(self, task: PrefillTask) -> list[NetworkRows]:
        return [each.network for each in self._tasks if each.network and each.adapter == task.adapter]

    def _embed(self, task: PrefillTask, pool: Pool, length: int) -> None:
        ids_1L = mx.array(task.ids[task.done : task.done + length])[None]
        pool.take(self._model.hidden(ids_1L, cache=[*task.kv, RowTag((task.rows[0],))])[0])
        self._fed(task, length)

    def _together(self, task: PrefillTask, budget: int) -> list[PrefillTask]:
        """The task with others of its class that heads read, whole, in one forward; [] when there are no others."""
        if self._model.is_apart:
            return []
        most = int(min(budget, widest(0, self._pieces.area)))
        tasks: list[PrefillTask] = []
        width = 0
        for other in (task, *(each for each in self._tasks if each is not task)):
            if not _is_short_read(other, most) or other.sequence_class != task.sequence_class:
                continue
            if (len(tasks) + 1) * max(width, other.left) > most or len(tasks) == MOST_TOGETHER:
                break
            tasks.append(other)
            width = max(width, other.left)
        return tasks if len(tasks) > 1 and tasks[0] is task else []

    def _embed_together(self, tasks: list[PrefillTask]) -> int:
        """One forward of whole texts, padded at the end: no position sees what follows it, and no KV is kept."""
        width = max(task.left for task in tasks)
        ids_BL = mx.array([task.ids + [0] * (width - task.left) for task in tasks])
        kv = self._model.new_kv()
        hidden_BLH = self._model.hidden(ids_BL, cache=[*kv, RowTag(tuple(task.rows[0] for task in tasks))])
        self._pieces.begin(hidden_BLH, ids_BL.size)
        for task, hidden_LH in zip(tasks, hidden_BLH, strict=True):
            assert task.pool is not None
            task.pool.take(hidden_LH[: task.left])
            task.done = len(task.ids)
        return ids_BL.size

    def _fed(self, task: PrefillTask, length: int) -> None:
        self._pieces.begin([cache.state for cache in task.kv], length)
        task.done += length

    def _begin(self, task: PrefillTask) -> None:
        """Start from what is cached; ids that are to be scored are fed in any case."""
        version = self._model.adapters.version(task.rows[0])
        prefix = self._prefixes.longest(task.ids, version, task.from_cache(task.score_from), tenants_of(task.rows))
        task.kv, task.done = prefix.kv or self._model.new_kv(), prefix.length
        if not task.reports and (begun := self._begun(task.rows[0], prefix.kv or ())):
            task.kv, task.done = begun
        task.cached, task.kv_versions = task.done, {version} if task.done else set()
        if task.pool is None:
            task.stops = self._prefixes.snapshot_positions(task.rows[0].prompt, version, task.done)


def _is_short_read(task: PrefillTask, most: int) -> bool:
    """True if a task only feeds a head, has not begun and has at most `most` ids."""
    return not task.done and task.left <= most and all(row.spec.kind == "head" for row in task.rows)


def _waits_for(task: PrefillTask, head: str, adapter: str) -> bool:
    """True if a task is complete except for the output of this head."""
    heads = {row.spec.head for row in task.rows if row.spec.kind == "head"}
    return task.adapter == adapter and head in heads and not task.left and head not in task.outputs


def _collect(task: PrefillTask, logits_LV: mx.array, targets: list[int], start: int) -> None:
    """Reduce a chunk's logits, which begin at an id's index, to the log-probabilities of the ids that follow, and of
    others that are asked about."""
    logprobs_LV = logits_LV - mx.logsumexp(logits_LV, axis=-1, keepdims=True)
    chosen_L = mx.take_along_axis(logprobs_LV, mx.array(targets)[:, None], axis=-1)[:, 0]
    if task.top_count:
        task.top_logprobs += top_lists(*most_likely(logprobs_LV, min(task.top_count, logprobs_LV.shape[-1])))
    for row in task.rows:
        if wants_others(row.sampling) and wants_prompt_logprobs(row):
            task.others.setdefault(row, []).extend(others(row.sampling, logits_LV, logprobs_LV, start))
    task.logprobs += cast(list[float], chosen_L.tolist())


class Followers:
    """Rows that wait in one engine for a running row to store the prefix that they share with it."""

    def __init__(self, prefixes: PrefixCache, adapters: Adapters) -> None:
        self._prefixes = prefixes
        self._adapters = adapters
        self._leaders: dict[Row, Row] = {}

    def add(self, task: PrefillTask, batch: RunningBatch | PartedBatch) -> bool:
        """Let a task's row wait if one that is fed now computes what it needs; False when it should start."""
        (row,) = task.rows
        if row.spec.fresh:
            return False
        version = self._adapters.version(row)
        shared = self._prefixes.worth_sharing(task.ids, version)
        if not shared:
            return False
        beginning = task.ids[:shared]
        for leader in batch.prefilling_rows:
            if not leader.spec.cache or list(leader.prompt[:shared]) != beginning:
                continue
            if self._adapters.version(leader) != version:
                continue
            if self._prefixes.needs_snapshots:
                common = self._prefixes.common(leader.prompt, task.ids)
                if not batch.stop_between(leader, shared, common):
                    continue
            self._leaders[row] = leader
            return True
        return False

    def ready(self, prefilling: Collection[Row]) -> list[Row]:
        """The rows whose leader is done; they wait no longer."""
        rows = [row for row, leader in self._leaders.items() if leader not in prefilling]
        for row in rows:
            del self._leaders[row]
        return rows

    def remove(self, row: Row) -> None:
        """Forget a row, whether it waits or leads."""
        self._leaders.pop(row, None)
