"""What is found out and made ready on a machine before the first row comes.

*Sizes*: how much of prompts one forward may take, by the clock. A prompt's forward stands between two decode steps, so
it gets `PIECE_S`; on a GPU 512 tokens take hardly longer than one, and a 0.6B model feeds 8,192 in that time. Where
attention keeps its scores (on CUDA, for masked rows), time and memory grow with rows x width x (past + width): one
prompt of 8,192 tokens of a 0.6B model took all of an H100's 80 GB. So that *area* has a limit of its own.

*Warm-up*: rows are decoded and thrown away, since a GPU compiles kernels, records graphs and gets memory when each is
needed for the first time. A CPU does none of that, and is not kept waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from shared.sequences import SamplingParams, SequenceSpec
from worker.engine.engine import Engine
from worker.engine.messages import EngineConfig, RowRequest
from worker.engine.model.loader import LoadedModel, free_bytes
from worker.engine.ranks.turns import TurnFacts

log = logging.getLogger(__name__)

PIECE_S = 0.05  # of a forward of prompts between two decode steps
CPU_PIECE_S = 0.25  # there a decode step of many rows takes as long
CHUNKS = (256, 16_384)  # fewest and most tokens of prompts at once
CPU_CHUNKS = (64, 512)
USUAL_PROMPT = 128  # tokens, of the prompts that are measured together
FREE_PART = 8  # of the free memory, an eighth may go for a forward
WARM_UP_S = 60.0  # after which no more is tried
WARM_TOKENS = 24
FOLLOWED = 4  # steps that check drafts, of which one is followed by another before it is read
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 40},
    {"temperature": 0.0, "top_logprobs": 5},
)
PLAIN = SAMPLINGS[:3]  # of which a step may stay unread

Forward = Callable[[int, int], float]  # rows, width -> seconds; infinite: it takes too much memory


def prepare(loaded: LoadedModel, config: EngineConfig) -> EngineConfig:
    """The configuration with what was measured; what can be warmed up is. In the engine's thread, before any row."""
    began = time.perf_counter()
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    forward = _timed(loaded)
    if not config.prefill_chunk:
        bounds, bound_s = (CPU_CHUNKS, CPU_PIECE_S) if on_cpu else (CHUNKS, PIECE_S)
        config = replace(config, prefill_chunk=largest_chunk(forward, *bounds, bound_s), piece_s=bound_s)
    if on_cpu:
        return replace(config, lane_s=CPU_PIECE_S)
    width = largest_width(forward, *CHUNKS, PIECE_S)
    config = replace(config, prefill_area=width * width, lane_s=PIECE_S)
    measured = time.perf_counter()
    rows = list(rehearse(loaded, config)) if config.warm_up else []
    log.info(
        "engine.warm prefill_chunk=%d prompt_width=%d rows=%s measured_s=%.1f warmed_s=%.1f",
        config.prefill_chunk, width, rows, measured - began, time.perf_counter() - measured,
    )  # fmt: skip
    return config


def largest_chunk(forward: Forward, fewest: int, most: int, bound_s: float) -> int:
    """The most tokens, of prompts of usual length, whose forward keeps the bound; a power of two."""
    best, tokens = fewest, fewest
    while tokens <= most:
        rows = max(1, tokens // USUAL_PROMPT)
        took = forward(rows, tokens // rows)
        if took > bound_s:
            break
        best = tokens
        if took * most / tokens <= bound_s / 2:
            return most  # in proportion, and with room: no need to compute more
        tokens *= 2
    return best


def largest_width(forward: Forward, fewest: int, most: int, bound_s: float) -> int:
    """The most tokens of one prompt whose forward keeps the bound, and does not take too much memory."""
    best, width = fewest, 2 * fewest
    while width <= most and forward(1, width) <= bound_s:
        best, width = width, 2 * width
    return best


def _timed(loaded: LoadedModel) -> Forward:
    """The quicker of two forwards, after one that makes what they need."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)

    def once(rows: int, width: int) -> float:
        began = time.perf_counter()
        caches = [cache.merge([cache] * rows) for cache in loaded.kv.new(loaded.model)]
        loaded.model(mx.zeros((rows, width), mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
        return time.perf_counter() - began

    def forward(rows: int, width: int) -> float:
        if on_cpu:
            return min(once(rows, width) for _ in range(2))
        free, before = free_bytes(), mx.get_active_memory()
        mx.reset_peak_memory()
        try:
            seconds = min([once(rows, width) for _ in range(3)][1:])
        except RuntimeError:  # out of memory
            return float("inf")
        return seconds if mx.get_peak_memory() - before <= free // FREE_PART else float("inf")

    ranks = loaded.ranks
    # All ranks come to the same sizes: what the slowest takes counts.
    return forward if ranks is None else lambda rows, width: ranks.most(forward(rows, width))


def rehearse(loaded: LoadedModel, config: EngineConfig) -> Iterator[int]:
    """Decode rows of usual sizes, in engines of their own; the numbers of rows, as they are done.

    Drafts are checked in steps of every width, in each of the ways that have kernels of their own: of one length or of
    several, by rows that end together or of which some have fallen behind, in steps that are read at once and in such
    that others follow before.
    """
    until = time.perf_counter() + WARM_UP_S
    drafts = config.speculation and replace(
        config.speculation, adapts_to_rows=False, adapts_to_time=False, own_text=False
    )
    of_length = (
        [replace(drafts, tokens=length, overlaps=False) for length in range(1, drafts.tokens + 1)] if drafts else []
    )
    engines = [Engine(loaded, replace(config, speculation=each)) for each in (None, *of_length)]
    followed = [Engine(loaded, replace(config, speculation=drafts))] if drafts and drafts.overlaps else []
    most = max(WARM_TOKENS, _tokens_with(len(of_length)))
    try:
        for rows in usual_rows(config.max_rows):
            for samplings in (SAMPLINGS[:1], SAMPLINGS):
                said = _decoded(loaded, engines[0], _requests(loaded, samplings, most, [()] * rows), until)
            for length, engine in enumerate(engines[1:], 1):
                tokens = _tokens_with(length)
                for others in (tokens, length):  # these draft one token less
                    guesses = [_guess(said[row], row, others if row % 2 else tokens) for row in range(rows)]
                    _decoded(loaded, engine, _requests(loaded, SAMPLINGS, tokens, guesses), until)
            for engine in followed:
                tokens = _tokens_with(len(of_length), FOLLOWED)
                said = _decoded(loaded, engines[0], _requests(loaded, PLAIN, tokens, [()] * rows), until)
                guesses = [_guess(said[row], row, tokens) for row in range(rows)]
                _decoded(loaded, engine, _requests(loaded, PLAIN, tokens, guesses), until)
            if _is_late(loaded, until):
                return
            yield rows
    finally:
        for engine in (*engines, *followed):
            engine.close()


def _decoded(loaded: LoadedModel, engine: Engine, requests: Sequence[RowRequest], until: float) -> list[list[int]]:
    """What each row says, as far as it comes until then."""
    said: dict[str, list[int]] = {request.spec.id: [] for request in requests}
    engine.submit(requests)
    while engine.busy and not _is_late(loaded, until):
        for event in engine.turn(None if loaded.ranks is None else TurnFacts(now_ms=0)).events:
            said[event.seq] += event.tokens
        engine.settle()
    return list(said.values())


def _is_late(loaded: LoadedModel, until: float) -> bool:
    """Whether this time has come, on any rank if there are several."""
    late = time.perf_counter() > until
    return late if loaded.ranks is None else loaded.ranks.most(late) > 0


def usual_rows(most: int) -> list[int]:
    """Numbers of rows to warm up for: 1, 4, 16 and so on, and the most."""
    rows = [1]
    while 4 * rows[-1] < most:
        rows.append(4 * rows[-1])
    return sorted({*rows, most})


def _tokens_with(length: int, checks: int = 2) -> int:
    """Of a row whose drafts are so long: one, so many steps that check drafts, and two that do not."""
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
