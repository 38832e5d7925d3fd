"""One turn of the engine's loop: admit -> prefill -> decode -> events. Runs in the engine's thread only.

Life of a row: `submit` puts it into `_waiting`; `_admit` moves it to the prefill lane or straight into the batch when a
row and KV are free; `_decode` turns its tokens into events; `_leave` frees everything that it held.

Invariants. A row is in exactly one of waiting, lane and batch, and its sequence id is in `_rows` all that time. Every
submitted row gets exactly one event with a finish, and none after it; only one that is submitted again while it runs
gives way to the newer attempt without a word.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import mlx.core as mx

from mlx_model.config import EngineConfig
from mlx_model.device import gave_out
from mlx_model.kv.kinds import kind_of, leaves
from mlx_model.loader import LoadedModel
from mlx_model.memory import bound_freed_memory
from shared.errors import EngineError, ParallmError
from shared.frames import Finish, TokenEvent
from shared.sequences import SequenceClass
from shared.text.codec import TextCodec
from worker.engine.batch.adapters import Adapters
from worker.engine.batch.grammars import Grammars
from worker.engine.batch.keeping import Keeping
from worker.engine.batch.parted_batch import PartedBatch
from worker.engine.batch.prefill_lane import Followers, PrefillLane, PrefillTask, promote, task_for
from worker.engine.batch.prompt_group import Entry
from worker.engine.batch.prompts_in_flight import Pieces
from worker.engine.batch.row import Deadlines, Row, WaitingRows
from worker.engine.batch.row_model import RowModel
from worker.engine.batch.running_batch import RunningBatch
from worker.engine.batch.shared_prompts import SharedPrompts
from worker.engine.batch.stop_text import RowText
from worker.engine.gallery import Gallery
from worker.engine.messages import EndReason, EngineStats, RowRequest, StepOutput, Throughput
from worker.engine.prefixes.disk.tiered_cache import prefix_cache
from worker.engine.reserved import Reserved, RowTokens
from worker.engine.scheduler import ChunkSize, ClassTurns, Limits, haste, share_prefill
from worker.engine.speculation.batch import batch_of
from worker.engine.speculation.draft_batch import draft_batch
from worker.engine.speculation.drafting import Drafting
from worker.engine.turns import RankReport, TurnFacts, in_lockstep, now_ms

log = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3  # forwards that fail one after another before the engine gives up


class Engine:
    """The rows of one model on this machine. What is in `prefixes`, peers and disks move, too."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        adapters: Adapters | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """`wake`: called in another thread when a waiting row may go on; without it nothing is done in threads."""
        self._ranks = loaded.ranks
        self._config = config = config if self._ranks is None else in_lockstep(config)
        by_ranks = self._ranks is not None
        self._codec = TextCodec(loaded.tokenizer)
        self._eos_ids = frozenset(loaded.card.eos_token_ids)
        self._grammars = Grammars(loaded.tokenizer, loaded.card.vocab_size, None if self._ranks else wake)
        self._limits = Limits.of(loaded.card, loaded.kv_limit_bytes, loaded.draft_kv)
        bound_freed_memory(self._limits.kv_limit_bytes)
        quick, tuning = config.quick_at_once, loaded.tuning
        self._model = RowModel(
            loaded.model, adapters, loaded.kv, loaded.heads, loaded.ranks, quick=quick, tuning=tuning
        )
        self._gallery = Gallery(loaded.tower, config, loaded.card, in_thread=wake is not None, by_ranks=by_ranks)
        chunk = ChunkSize(config.prefill_chunk, config.piece_s, config.largest_chunk, config.alone)
        self._pieces = Pieces(chunk, config.prefill_area, by_ranks=by_ranks)
        self._class_turns = ClassTurns()
        at_once = max(1, config.score_chunk_bytes // (4 * loaded.card.vocab_size))
        new_kv, pieces = self._model.new_kv(), self._pieces
        self.prefixes = prefix_cache(config, loaded.card, new_kv, wake, lambda: pieces.token_s, loaded.shares)
        self._keeping = Keeping(self.prefixes, self._limits.kv_bytes, config.keep_bytes)
        drafts = draft_batch(loaded, config, chunk)
        self.drafting = Drafting(config.speculation, new_kv, drafts, context=loaded.card.context_length)
        form = loaded.kv.shares if self._model.stages == 1 else None
        layer_bytes = self._limits.shared_bytes(1) // max(1, sum(kind_of(leaf).is_cut for leaf in leaves(new_kv)))
        self._shared = SharedPrompts(config.share_prompts, layer_bytes, form, self._model.reads_beginnings)
        self._batch = batch_of(self._model, config, pieces, self._keeping, self._shared, self.drafting)
        self._lane = PrefillLane(
            self._model, self.prefixes, self._keeping, at_once, pieces, lambda row, kv: self._batch.begun(row, kv)
        )
        self._followers = Followers(self.prefixes, self._model.adapters)
        self._waiting = WaitingRows()
        self._rows: dict[str, Row] = {}
        self._reserved = Reserved(self._limits, config.max_rows, shares=self._shared.may_be)
        self._deadlines = Deadlines()
        self._events: list[TokenEvent] = []
        self._loading = False  # adapters
        self._frozen = False  # nothing is computed; commands, deadlines and adapter loads go on
        self._stalled = False  # all who wait, wait for their adapter or their grammar
        self._was_in_lane = False  # the latest prompt of those that are computed one by one
        self._steps = self._failures = 0
        self._throughput = Throughput()

    @property
    def config(self) -> EngineConfig:
        """The settings that the engine follows: those it was given, or what ranks make of them."""
        return self._config

    @property
    def model(self) -> RowModel:
        """The model, with the adapters, heads and networks of its rows."""
        return self._model

    @property
    def batch(self) -> RunningBatch | PartedBatch:
        """The rows that have been admitted, and their KV."""
        return self._batch

    @property
    def rows(self) -> Mapping[str, Row]:
        """All sequences of the engine by their ids, those that wait included."""
        return self._rows

    @property
    def gallery(self) -> Gallery:
        """The images of the rows, and their vectors."""
        return self._gallery

    @property
    def pieces(self) -> Pieces:
        """How much of a prompt is fed at once."""
        return self._pieces

    @property
    def busy(self) -> bool:
        """True if the next turn has work to do."""
        waits = self._frozen or (self._stalled and len(self._rows) == len(self._waiting) and not self._gallery.busy)
        return bool(self._events or self._loading or self.prefixes.busy or (self._rows and not waits))

    @property
    def has_rows(self) -> bool:
        """True if the engine has any sequence, including those that wait for an adapter or a grammar."""
        return bool(self._rows)

    @property
    def decoding(self) -> bool:
        """True if any sequence prefills or decodes."""
        return not self._frozen and len(self._rows) > len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """True if the engine has no sequences, is not frozen, and has no other work."""
        return not (self._rows or self._frozen or self.busy)

    def quicken(self) -> None:
        """Decode by the forward that is made for it, if this model has one, from the next step on."""
        with mx.stream(self._batch.stream):
            self._model.quicken()

    def measured(self, chunk: int, area: int | None) -> None:
        """How much of prompts this machine feeds in time (warm_up.py); None: a forward may have any area."""
        self._pieces.chunk.measured(chunk)
        self._pieces.area = area

    def submit(self, requests: Iterable[RowRequest]) -> None:
        """Take sequences in; one that cannot run gets its finish in the next turn."""
        self._stalled = False
        for request in requests:
            try:
                self._take(request)
            except ParallmError as error:
                self._events.append(request.refused(error))
            except Exception as error:
                log.exception("engine.bad_request seq=%s", request.spec.id)
                self._events.append(request.refused(EngineError(f"{type(error).__name__}: {error}")))

    def cancel(self, seq_id: str, reason: EndReason = "cancelled") -> None:
        """End a sequence; unknown ones are ignored."""
        if (row := self._rows.get(seq_id)) is not None:
            self._end([row], Finish(reason))

    def freeze(self, *, clear_cache: bool) -> None:
        """Stop computing; rows stay as they are, and deadlines count on. `clear_cache`: no KV outlives this."""
        self._frozen = True
        if clear_cache:
            self.clear_cache(rows=True)

    def clear_cache(self, *, rows: bool) -> None:
        """Forget KV of earlier prompts; with `rows` that of running rows, too, which compute theirs again."""
        self.prefixes.clear()
        if rows:
            self._restart([row for row in self._rows.values() if row.admitted])

    def relieve(self, *, drops_caches: bool) -> None:
        """Under memory pressure, and once after it: hold no memory that no row needs, or do so again."""
        with mx.stream(self._batch.stream):
            self.prefixes.bound(0 if drops_caches else self._config.prefix_cache_bytes)
        mx.clear_cache()

    def set_aside(self, seq_ids: Iterable[str]) -> None:
        """Let rows go without a last word and keep their KV: they go on later, here or elsewhere."""
        self.settle()
        with mx.stream(self._batch.stream):
            try:
                self._batch.stop_ahead()
            finally:
                self._publish(self._batch.news())
            rows = [self._rows[seq] for seq in seq_ids if seq in self._rows]
            self._batch.set_aside(rows)
            self._lane.set_aside(rows)
        self._leave(rows)

    def thaw(self) -> None:
        """Go on where `freeze` stopped."""
        self._frozen = False

    def seen(self) -> RankReport:
        """Among several ranks, once before each turn: what this one has seen since the last one."""
        self.settle()
        times = haste(self._batch.decoding)
        with mx.stream(self._batch.stream):
            if not self._frozen:
                self._gallery.work(self._config.between_steps_s * times)
            images = self._gallery.news(times)
        return RankReport(now_ms(), self._pieces.took_s, *self._model.adapters.take_read(), images)

    def turn(self, facts: TurnFacts | None = None) -> StepOutput:
        """One turn of the loop. `facts`: among several ranks, the same on all of them."""
        assert (facts is None) == (self._ranks is None), "ranks turn by what they have agreed on"
        facts = facts or TurnFacts(now_ms())
        self._pieces.learn(facts.took_s)
        self._model.adapters.agree(facts.read, facts.unreadable)
        self._end(self._deadlines.passed(self._rows.values(), facts.now_ms), Finish("deadline"))
        with mx.stream(self._batch.stream):
            self._gallery.learn(facts.images)
            self.prefixes.work()
        if not self._frozen:
            self._compute()
        self._load_adapters()
        events, self._events = self._events, []
        return StepOutput(events, len(self._rows))

    def _compute(self) -> None:
        self.settle()
        if self._ranks is None:
            with mx.stream(self._batch.stream):
                self._gallery.work(self._config.between_steps_s * haste(self._batch.decoding))
        self._pieces.open()
        self._start(self._followers.ready(self._batch.prefilling_rows), wait=False)
        self._admit()
        of = self._class_turns.choose(self._batch.waiting | self._lane.waiting)
        budget = self._pieces.chunk.at_once(self._batch.decoding)
        budget = self._pieces.pace.piece(budget) if of == "batch" else budget
        in_lane, in_batch = self._lane.first(of) is not None, of in self._batch.waiting
        if self._shared.is_needed and in_lane and in_batch:  # one prompt of a class, as admission counts
            in_lane = self._lane.has_begun(of) or not (self._was_in_lane or self._batch.has_begun(of))
            in_batch, self._was_in_lane = not in_lane, in_lane
        share = share_prefill(budget, batch_waits=in_batch, lane_waits=in_lane)
        if in_lane:
            self._prefill(share.lane, of)
        if len(self._batch):
            self._decode(share.batch if in_batch or not in_lane else 0, of)
        elif not in_lane:
            self._pieces.forget()  # nothing was computed: that says nothing of the machine's pace

    def settle(self) -> None:
        """Wait for the prompts' pieces under way: after their turn's events are out, before new commands are taken."""
        try:
            self._pieces.settle()
        except Exception as error:
            self._give_up_batch(error, self._lane.give_up())

    def stats(self) -> EngineStats:
        """A snapshot of counters and sizes, stamped with the current time."""
        waiting = len(self._waiting)
        return EngineStats(
            rows=len(self._rows) - waiting,
            prefilling=len(self._rows) - waiting - self._batch.decoding,
            waiting=waiting,
            kv_bytes=self._reserved.bytes,
            kv_limit_bytes=self._limits.kv_limit_bytes,
            kv_spared_bytes=self._limits.shared_bytes(self._batch.spared),
            shares_prompts=self._shared.may_be,
            steps=self._steps,
            tokens=self._throughput.tokens,
            last_step_ms=time.monotonic_ns() // 1_000_000,
            tokens_per_s=self._throughput.rate,
            prefix=self.prefixes.stats,
            disk=self.prefixes.disk,
            prefill_token_s=self._pieces.token_s,
            speculation=self.drafting.stats,
            vision=self._gallery.stats,
        )

    def close(self, *, keep: bool = False) -> None:
        """End what runs in other threads; `keep` cached KV on disk, if there is one."""
        self._grammars.close()
        self._gallery.end()
        with mx.stream(self._batch.stream):
            self.prefixes.close(keep=keep)

    def _take(self, request: RowRequest) -> None:
        spec = request.spec
        if refusal := self._limits.refusal(spec):
            raise refusal
        if spec.id in self._rows:
            self._leave([self._rows[spec.id]])  # claimed again: the newer attempt is the one that counts
        s = spec.sampling
        text = RowText(self._codec, s) if s.stop and spec.kind == "generate" else None
        row = Row(request, self._eos_ids, text)
        if spec.kind == "generate" and (finish := row.resume()):
            self._events.append(row.last_event(finish))
            return
        self._model.check(spec)
        self._gallery.check(row.viewing, request.pictures)
        self._model.adapters.admit(row)
        if s.grammar and spec.kind == "generate":
            row.place = self._grammars.open(s.grammar, row.tokens, spec.tenant)
        promote(row, self._model.adapters, self.prefixes)
        self._gallery.open(row.viewing, request.pictures)
        self._rows[spec.id] = row
        self._waiting.add(row)
        self._deadlines.add(row)

    def _admit(self) -> None:
        """Give rows and KV to those who wait, in order; the first one that does not fit stops the rest."""
        admitted: list[Row] = []
        self._stalled = True
        for row in list(self._waiting):
            version = self._model.adapters.prefill_key(row)
            if row.reserved.version != version:
                row.reserved = RowTokens.of(row.spec, version)
            if not self._reserved.fits(row.reserved):
                self._stalled = False
                break
            if not self._can_start(row):
                continue
            self._waiting.remove(row)
            row.admitted = True
            self._reserved.add(row.reserved)
            admitted.append(row)
        self._shared.is_needed = self._reserved.need_sharing
        self._start(admitted)

    def _can_start(self, row: Row) -> bool:
        """True if the row's grammar is compiled, its adapter loaded, its images encoded and its KV read from disk."""
        try:
            is_ready = (row.place is None or row.place.ready) and self._model.adapters.ready(row)
            is_ready &= self._gallery.ready(row.viewing)
            promote(row, self._model.adapters, self.prefixes)
            return is_ready and not row.promotion.waits
        except ParallmError as error:
            self._end([row], Finish.failed(error))
            return False

    def _start(self, rows: list[Row], *, wait: bool = True) -> None:
        """Prefill admitted rows: equal prompts and reports in our lane, others in the batch; some may `wait`."""
        tasks = [task_for(row, self._model.adapters.prefill_key(row)) for row in rows]
        shared = Counter(task.key for task in tasks)
        for task in tasks:
            if task.reports or shared[task.key] > 1 or self._lane.has_equal(task):
                self._lane.add(task)
            elif not (wait and self._followers.add(task, self._batch)):
                with mx.stream(self._batch.stream):  # which prefills what is not cached
                    self._batch.insert(task.entry(self._model.adapters.version(task.rows[0]), self.prefixes))

    def _prefill(self, budget: int, of: SequenceClass) -> None:
        """Feed prompts of a class in our lane, for a bounded time; complete ones fork into the batch."""
        until = time.perf_counter() + self._config.lane_s
        while budget > 0 and (task := self._lane.first(of)):
            try:
                with mx.stream(self._batch.stream):
                    budget -= self._lane.feed(task, budget)
                self._failures = 0
            except Exception as error:
                self._lane.take_out(task)
                self._failed(task.rows, error)
                return
            if task.left:
                continue
            self._lane.take_out(task)
            budget = 0 if self._shared.is_needed else budget  # until it has joined it is a copy
            for row in task.rows:
                row.take_kv(task.cached, task.kv_versions)
            self._scored(task)
            if rows := [row for row in task.rows if row.spec.kind == "generate"]:
                self._batch.insert(Entry(rows, task.ids[-1:], task.kv if task.done else None, task.done))
            if time.perf_counter() > until:
                return

    def _scored(self, task: PrefillTask) -> None:
        """Publish the results of a prefill: log-probabilities, an embedding or a head's output."""
        with mx.stream(self._batch.stream):
            reports = self._lane.reports(task)
        for row, event in reports:
            if event.finish is not None:
                self._leave([row])
            if event.prompt_logprobs is not None or event.finish is not None:
                self._events.append(event)

    def _decode(self, prefill_tokens: int, of: SequenceClass) -> None:
        try:
            self._batch.step(prefill_tokens, of)
        except Exception as error:
            self._give_up_batch(error)
            return
        self._failures = 0
        self._steps += self._batch.has_decoded
        self._publish(self._batch.news())

    def _publish(self, events: list[TokenEvent], *, keeps: bool = True) -> None:
        self._events += events
        self._throughput.add(sum(len(event.tokens) for event in events), time.monotonic())
        ended = [self._rows[event.seq] for event in events if event.finish is not None]
        if ended and keeps:
            with mx.stream(self._batch.stream):
                self._batch.keep_answers(ended)
        self._leave(ended)

    def _give_up_batch(self, error: Exception, besides: Iterable[Row] = ()) -> None:
        rows = [*self._batch.give_up(), *besides]
        self._publish(self._batch.news(), keeps=False)
        self._pieces.forget()
        self._shared.clear()
        self._batch = batch_of(self._model, self._config, self._pieces, self._keeping, self._shared, self.drafting)
        self._failed([row for row in rows if self._rows.get(row.spec.id) is row], error)

    def _load_adapters(self) -> None:
        with mx.stream(self._batch.stream):
            self._loading = self._model.adapters.work(self._config.between_steps_s)
        self._restart(self._model.adapters.take_moved())

    def _restart(self, rows: list[Row]) -> None:
        """Compute the context of these rows again, under the version that they have come to."""
        decoding = [row for row in rows if row.tokens]
        self._batch.remove(rows)
        for row in rows:
            self._lane.remove(row)
            self._followers.remove(row)
            row.rewind()
        for row in decoding:
            self._batch.insert(Entry([row], row.context))
        self._start([row for row in rows if not row.tokens])

    def _failed(self, rows: list[Row], error: Exception) -> None:
        """A forward failed: its rows end, the engine goes on unless it keeps failing, or other ranks go on.

        Where the GPU gave out the rows are not to blame, and what the engine would compute next may be wrong: it ends,
        and the worker hands all rows back.
        """
        if self._ranks is not None or gave_out(error):
            raise error
        log.error("engine.forward_failed rows=%d", len(rows), exc_info=error)
        self._failures += 1
        self._end(rows, Finish.failed(EngineError(f"{type(error).__name__}: {error}")))
        if self._failures >= FAILURES_IN_A_ROW:
            raise error

    def _end(self, rows: list[Row], finish: Finish) -> None:
        self._events += [row.last_event(finish) for row in rows]
        self._leave(rows)

    def _leave(self, rows: list[Row]) -> None:
        """Free what rows hold, wherever they are."""
        self._batch.remove(rows)
        for row in rows:
            del self._rows[row.spec.id]
            if row.admitted:
                self._reserved.remove(row.reserved)
                self._lane.remove(row)
                self._followers.remove(row)
            else:
                self._waiting.remove(row)
            if row.place is not None:
                self._grammars.leave(row.place)
            row.promotion.cancel()
            self._gallery.close(row.viewing)
            self._model.adapters.release(row)
