"""Measuring and compiling on a machine while no row is there; a worker is ready, and serves, before it.

*Sizes*: how much of prompts one forward may take, by the clock. A prompt's forward stands between two decode steps, so
it gets a `piece_s`; on CUDA 512 tokens take hardly longer than one, and a 0.6B model feeds 8,192 in that time. Where
attention keeps its scores (on CUDA, for masked rows), time and memory grow with rows x width x (past + width): one
prompt of 8,192 tokens of a 0.6B model took all of an H100's 80 GB. So that *area* has a limit of its own. Until both
are measured an engine has sizes that any machine can do (`begun`), and its chunk grows as its pieces come in time.
Metal measures neither: the chunk is what real pieces show, and its attention of prompts is fused for usual heads.

*Kernels of ours*: on CUDA each is compiled and tried first, and decode steps are mlx-lm's until that is done. Metal's
are tried where they are first needed: they take a compiler a moment.

*Rehearsal*: rows are decoded and thrown away, since CUDA compiles kernels, records graphs and gets memory when each is
needed for the first time. Others do little or nothing of that.

Invariants.
- All of it is done in pieces, one at a time, and only while the engine is idle: who comes waits for one piece at most.
  A worker that is never idle would decode by mlx-lm's forward for ever: there the kernels' few pieces come amid its
  rows, `PATIENCE_S` apart.
  A piece is one forward, or one turn of an engine. The sizes that are tried end with the first one that takes more than
  its bound, so where nothing is compiled no piece takes more than about four times as long, or, where the
  fewest tokens take longer than that, than these. What is compiled in a piece cannot be interrupted: seconds each.
- On several ranks all do the same pieces, and come to the same sizes (orders.py:Rehearse).
- An error ends it, and nothing else, but among ranks, which would no longer do the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_model.config import EngineConfig
from mlx_model.device import Backend, backend, on_cuda, on_metal
from mlx_model.loader import LoadedModel
from mlx_model.memory import free_bytes
from mlx_model.sampling.cuda import draws
from mlx_model.step.cuda import products
from mlx_model.tuned import ModelTuning
from shared.sequences import SamplingParams, SequenceSpec
from worker.engine.batch.adapters import Adapters, NoAdapters
from worker.engine.batch.row import Row
from worker.engine.between_steps import Work
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest
from worker.engine.turns import TurnFacts

log = logging.getLogger(__name__)

PIECE_S = 0.05  # of a forward of prompts between two decode steps, on CUDA
SLOW_PIECE_S = 0.25  # elsewhere: a CPU's decode step takes as long; a Mac feeds a 4B model too few tokens in less
CHUNKS = (256, 16_384)  # fewest and most tokens of prompts at once
CPU_CHUNKS = (64, 512)
PROBE = 4  # tokens, first on a CPU: of a model that takes long for these no more are tried
METAL_CHUNKS = (256, 2048)
METAL_ALONE = (1024, 2048)  # while nothing decodes: fewer waste a forward, and more gain nothing
METAL_FUSED_HEADS = frozenset({64, 80, 128})  # whose attention of prompts keeps no scores there
FIRST_WIDTH = 1024  # of one prompt, before it is measured: scores of 4 MB a head
USUAL_PROMPT = 128  # tokens, of the prompts that are measured together
FREE_PART = 8  # of the free memory, an eighth may go for a forward
WARM_TOKENS = 24
PATIENCE_S = 30.0  # between two pieces that come amid rows
FOLLOWED = 4  # steps that check drafts, of which one is followed by another before it is read
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 40},
    {"temperature": 0.0, "top_logprobs": 5},
)
PLAIN = SAMPLINGS[:3]  # of which a step may stay unread

Forward = Callable[[int, int], Work[float]]  # rows, width -> seconds; infinite: it takes too much memory


class Sizes(NamedTuple):
    """Pieces of prompts on a back end."""

    chunks: tuple[int, int]  # fewest and most tokens
    piece_s: float
    alone: tuple[int, int] | None = None


SIZES: dict[Backend, Sizes] = {
    "cpu": Sizes(CPU_CHUNKS, SLOW_PIECE_S),
    "cuda": Sizes(CHUNKS, PIECE_S),
    "metal": Sizes(METAL_CHUNKS, SLOW_PIECE_S, METAL_ALONE),
}


def begun(config: EngineConfig, head_size: int = 0, tuning: ModelTuning | None = None) -> EngineConfig:
    """The configuration to begin with: sizes that are safe anywhere where none are given.

    `head_size`: numbers of a head; 0: not known, or heads of several sizes. `tuning`: what was measured before.
    """
    sizes = SIZES["cuda" if _compiles() else backend()]
    if not config.prefill_chunk:
        fewest, most = (tuning.chunk, 0) if tuning else sizes.chunks
        config = replace(config, prefill_chunk=fewest, largest_chunk=most, piece_s=sizes.piece_s, alone=sizes.alone)
    keeps_scores = _compiles() or (on_metal() and head_size not in METAL_FUSED_HEADS)
    area = ((tuning.width if tuning else 0) or FIRST_WIDTH) ** 2 if keeps_scores else None
    return replace(config, lane_s=sizes.piece_s, prefill_area=area, quick_at_once=not _compiles())


def _compiles() -> bool:
    """True if this device compiles kernels, for seconds, when they are first needed."""
    return on_cuda()


class WarmUp:
    """Measures and warms up one engine, in its thread."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, engine: Engine, adapters: Adapters | None) -> None:
        """`config`: as `begun` makes it. `adapters`: what the model's linears are put into, if anything."""
        self._loaded, self._config, self._engine = loaded, config, engine
        self._adapters = _BaseOnly(adapters)
        self._pieces = self._all()
        self.is_over = not (_compiles() or (config.largest_chunk and not on_metal()))
        self._is_quick = not _compiles()
        self._latest = time.monotonic()  # when a piece ended

    @property
    def is_due(self) -> bool:
        """True if a busy engine has gone `PATIENCE_S` without a piece and its kernels are not compiled yet."""
        return not (self._is_quick or self.is_over) and time.monotonic() - self._latest > PATIENCE_S

    def close(self) -> None:
        """Drop the pieces that are left."""
        self._pieces.close()

    def piece(self) -> None:
        """Do the next piece of the warm-up."""
        with nullcontext() if self._loaded.ranks is None else mx.stream(generation_stream):
            try:
                next(self._pieces)
                self._latest = time.monotonic()
                return
            except StopIteration:
                pass
            except Exception:
                if self._loaded.ranks is not None:
                    raise
                log.exception("engine.warm_up_failed: the engine goes on with what it has")
        self.is_over = True

    def _all(self) -> Work[None]:
        config, bound_s = self._config, PIECE_S if _compiles() else SLOW_PIECE_S
        measures, rehearses = bool(config.largest_chunk), config.warm_up and _compiles()
        log.info("engine.warms_up measures_chunk=%s rehearses=%s", measures, rehearses)
        began = time.perf_counter()
        if _compiles():
            for is_there in _trials(self._loaded):
                is_there()
                yield
            self._engine.quicken()
            self._is_quick = True
            yield
        chunk, width = config.prefill_chunk, 0
        forward = timed_forward(self._loaded, self._adapters)
        if measures:
            bounds = CHUNKS if _compiles() else CPU_CHUNKS
            chunk = bounds[0]
            if _compiles() or (yield from forward(1, PROBE)) <= bound_s:
                chunk = yield from largest_chunk(forward, *bounds, bound_s)
        if _compiles():
            width = isqrt(config.prefill_area or 0)
            if width == FIRST_WIDTH:  # not measured before
                width = yield from largest_width(forward, *CHUNKS, bound_s)
        self._engine.measured(chunk, width * width or None)
        measured = time.perf_counter()
        rows: dict[int, None] = {}
        if rehearses:
            area = width * width
            sized = replace(config, prefill_chunk=chunk, largest_chunk=0, prefill_area=area, quick_at_once=True)
            for each in rehearse(self._loaded, sized, self._adapters):
                rows[each] = None
                yield
        log.info(
            "engine.warm prefill_chunk=%d prompt_width=%d rows=%s measured_s=%.1f warmed_s=%.1f",
            chunk, width, list(rows), measured - began, time.perf_counter() - measured,
        )  # fmt: skip


def _trials(loaded: LoadedModel) -> Iterator[Callable[[], object]]:
    """Compile and try our kernels, seconds each; later callers find the results cached."""
    yield products.are_there
    if products.are_there():
        yield partial(products.are_many_there, getattr(mx, loaded.card.dtype))
    yield draws.are_there


class _BaseOnly(NoAdapters):
    """For rows of the base, in a model whose linears may be those of adapters."""

    def __init__(self, adapters: Adapters | None) -> None:
        super().__init__()
        self._adapters = adapters or NoAdapters()

    def select(self, rows: tuple[Row, ...]) -> tuple[str, ...]:
        """Select the base for all rows; the next computation selects anew."""
        return self._adapters.select(rows)


def largest_chunk(forward: Forward, fewest: int, most: int, bound_s: float) -> Work[int]:
    """The most tokens, of prompts of usual length, whose forward keeps the bound; a power of two."""
    best, tokens = fewest, fewest
    while tokens <= most:
        rows = max(1, tokens // USUAL_PROMPT)
        took = yield from forward(rows, tokens // rows)
        if took > bound_s:
            break
        best = tokens
        if took * most / tokens <= bound_s / 2:
            return most  # in proportion, and with room: no need to compute more
        tokens *= 2
    return best


def largest_width(forward: Forward, fewest: int, most: int, bound_s: float) -> Work[int]:
    """The most tokens of one prompt whose forward keeps the bound, and does not take too much memory."""
    best, width = fewest, 2 * fewest
    while width <= most and (yield from forward(1, width)) <= bound_s:
        best, width = width, 2 * width
    return best


def timed_forward(loaded: LoadedModel, adapters: Adapters) -> Forward:
    """The quicker of two forwards, on a GPU after one that makes what they need."""
    on_cpu = not _compiles()

    def once(rows: int, width: int) -> float:
        adapters.select(())
        free, before = free_bytes(), mx.get_active_memory()
        mx.reset_peak_memory()
        began = time.perf_counter()
        try:
            caches = [cache.merge([cache] * rows) for cache in loaded.kv.new(loaded.model)]
            loaded.model(mx.zeros((rows, width), mx.int32), cache=caches)
            mx.eval([cache.state for cache in caches])
        except RuntimeError:  # out of memory
            if on_cpu:
                raise
            return float("inf")
        seconds = time.perf_counter() - began
        return seconds if on_cpu or mx.get_peak_memory() - before <= free // FREE_PART else float("inf")

    def forward(rows: int, width: int) -> Work[float]:
        times = []
        for _ in range(2 if on_cpu else 3):
            times.append(once(rows, width))
            yield
            if times[-1] == float("inf"):
                break
        seconds = min(times if on_cpu else times[1:] or times)
        # All ranks come to the same sizes: what the slowest takes counts.
        return seconds if loaded.ranks is None else loaded.ranks.most(seconds)

    return forward


def rehearse(loaded: LoadedModel, config: EngineConfig, adapters: Adapters | None = None) -> Iterator[int]:
    """Decode rows of usual sizes, in engines of their own; after each turn, how many rows decode now.

    One way to draw after the other, then all in one batch: so no turn compiles the kernels of all. Drafts are checked
    in steps of every width, in each of the ways that have kernels of their own: of one length or of several, by rows
    that end together or of which some have fallen behind, in steps that are read at once and in such that others follow
    before.
    """
    drafts = config.speculation and replace(
        config.speculation, adapts_to_rows=False, adapts_to_time=False, own_text=False
    )
    of_length = (
        [replace(drafts, tokens=length, overlaps=False) for length in range(1, drafts.tokens + 1)] if drafts else []
    )

    def engine_of(speculation: Any) -> Engine:
        return Engine(loaded, replace(config, speculation=speculation, disk=None), adapters)

    engines = [engine_of(each) for each in (None, *of_length)]
    followed = [engine_of(drafts)] if drafts and drafts.overlaps else []
    most = max(WARM_TOKENS, _tokens_with(len(of_length)))
    try:
        for rows in usual_rows(config.max_rows):
            alone = [SAMPLINGS[at : at + 1] for at in range(len(SAMPLINGS) if rows == 1 else 1)]
            for samplings in (*alone, SAMPLINGS):
                said = yield from _decoded(loaded, engines[0], _requests(loaded, samplings, most, [()] * rows))
            for length, engine in enumerate(engines[1:], 1):
                tokens = _tokens_with(length)
                for others in (tokens, length):  # these draft one token less
                    guesses = [_guess(said[row], row, others if row % 2 else tokens) for row in range(rows)]
                    yield from _decoded(loaded, engine, _requests(loaded, SAMPLINGS, tokens, guesses))
            for engine in followed:
                tokens = _tokens_with(len(of_length), FOLLOWED)
                said = yield from _decoded(loaded, engines[0], _requests(loaded, PLAIN, tokens, [()] * rows))
                guesses = [_guess(said[row], row, tokens) for row in range(rows)]
                yield from _decoded(loaded, engine, _requests(loaded, PLAIN, tokens, guesses))
    finally:
        for engine in (*engines, *followed):
            engine.close()


def _decoded(
    loaded: LoadedModel, engine: Engine, requests: Sequence[RowRequest]
) -> Generator[int, None, list[list[int]]]:
    """Decode the requests and return the tokens of each row; yields after every turn."""
    said: dict[str, list[int]] = {request.spec.id: [] for request in requests}
    engine.submit(requests)
    while engine.busy:
        for event in engine.turn(None if loaded.ranks is None else TurnFacts(now_ms=0)).events:
            said[event.seq] += event.tokens
        engine.settle()
        yield len(requests)
    return list(said.values())


def usual_rows(most: int) -> list[int]:
    """Numbers of rows to warm up for: 1, 4, 16 and so on, and the most."""
    rows = [1]
    while 4 * rows[-1] < most:
        rows.append(4 * rows[-1])
    return sorted({*rows, most})


def _tokens_with(length: int, checks: int = 2) -> int:
    """Tokens of a row with drafts of `length`: one, then `checks` steps that check drafts, and two that do not."""
    return 1 + checks * (length + 1) + 2


def _guess(said: Sequence[int], row: int, length: int) -> tuple[int, ...]:
    """So much of what a row will say; two rows of four err in the second token (the first comes without a draft)."""
    right = tuple(said[:length])
    return (right[0], 0 if right[1] else 1, *right[2:]) if len(right) > 1 and row % 4 > 1 else right


def _requests(
    loaded: LoadedModel, samplings: tuple[dict[str, Any], ...], tokens: int, guesses: Sequence[tuple[int, ...]]
) -> list[RowRequest]:
    """A row a guess; of as many rows, each one says the same again."""
    card, rows = loaded.card, len(guesses)
    tokens = max(1, min(tokens, card.context_length - 1))
    length = max(1, min(USUAL_PROMPT, card.context_length - tokens))
    requests = []
    for row, guess in enumerate(guesses):
        number = 1000 * rows + row
        prompt = tuple((7919 * number + 31 * at) % card.vocab_size for at in range(length))
        params = SamplingParams(tokens, number, ignore_eos=True, **samplings[row % len(samplings)])
        requests.append(RowRequest(SequenceSpec(f"warm-{row}", card.name, prompt, params, prediction_ids=guess)))
    return requests
