"""Rows that are drafted for, and the check that drafts change when tokens come and nothing else."""

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx.utils import tree_map

from mlx_model.config import SpeculationConfig
from mlx_model.loader import LoadedModel
from shared.frames import TokenEvent
from shared.sequences import SequenceSpec
from shared.text import grammar
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec

ALWAYS = SpeculationConfig(5, adapts_to_rows=False, adapts_to_time=False, memory_bytes=1 << 20)
ROWS = SpeculationConfig(adapts_to_time=False)  # as long as each row's are accepted
CLOSE = 1e-4  # log-probabilities
PACKED_CLOSE = {8: 0.01, 4: 0.2}  # by bits: a last bit may change a whole code; so those rows draw nothing by chance
DIGITS = grammar.of_regex("[0-9]{3}-[a-c]*x")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_logprobs": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs_mode": "processed_logprobs"},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0.8, "repetition_penalty": 0.8, "logprob_token_ids": (5, 6)},
    {"temperature": 1.0, "bad_words": ((7,), (30, 31), (3, 4, 5)), "allowed_token_ids": tuple(range(60))},
    {"min_tokens": 6, "stop_token_ids": tuple(range(0, 250, 2)), "ignore_eos": False, "temperature": 1.0},
    {"stop": ("\x10\x11", "z", "AB"), "temperature": 1.2},
    {"logit_bias": {4: 30.0, 9: 29.5}, "presence_penalty": 1.0},
    {"grammar": DIGITS, "ignore_eos": False, "temperature": 1.0},
    {"grammar": DIGITS, "ignore_eos": False, "top_logprobs": 0, "min_tokens": 4},
]


def outcome(events: list[TokenEvent]) -> tuple[object, ...]:
    """All but the log-probabilities, whose last bits differ."""
    finish = events[-1].finish
    assert finish is not None
    tokens = [token for event in events for token in event.tokens]
    return tokens, "".join(event.text or "" for event in events), finish.reason, finish.stop_match


def numbers(events: list[TokenEvent]) -> list[float]:
    """All log-probabilities, of competitors too."""
    own = [logprob for event in events for logprob in event.logprobs]
    return own + [each.logprob for event in events for top in event.top_logprobs or () for each in top]


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Where two rows say something else for the first time."""
    return next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)


class Shaken(SpiedModel):
    """A model whose logits differ by last bits, in another way in each forward."""

    size = 0.0

    def __call__(self, tokens_BL: mx.array, cache: list[Any]) -> mx.array:
        logits = super().__call__(tokens_BL, cache)
        return logits + self.size * mx.random.normal(logits.shape)


def is_on_edge(loaded: LoadedModel, row: SequenceSpec, tokens: list[int], size: float) -> bool:
    """Whether last bits decide one of these tokens: a number of its seed, or another logit, lies that close by."""
    for _ in range(16):
        bench = Bench(loaded, prefix_cache_bytes=0)
        Shaken.inside(bench).size = size
        bench.submit(row)
        bench.run()
        if bench.tokens(row.id)[: len(tokens)] != tokens:
            return True
    return False


def moves(loaded: LoadedModel, row: SequenceSpec, tokens: list[int]) -> list[float]:
    """How far its numbers move where weights differ by a rounding: some few move a thousand times as far as others."""
    kept, told = loaded.model.parameters(), list[list[float]]()
    try:
        for seed in [None, *range(4)]:
            if seed is not None:
                mx.random.seed(seed)
                loaded.model.update(tree_map(rounded, kept))
            bench = Bench(loaded, prefix_cache_bytes=0)
            bench.submit(row)
            bench.run()
            if bench.tokens(row.id) == tokens:
                told.append(numbers(bench.events[row.id]))
    finally:
        loaded.model.update(kept)
    moved = [[abs(one - other) for one, other in zip(each, told[0], strict=True)] for each in told[1:]]
    return [max(each) for each in zip(*moved, strict=True)]


def rounded(weight: mx.array) -> mx.array:
    """With other last bits, where it is not a code of a quantised one."""
    return weight * (1 + 1e-7 * mx.random.normal(weight.shape)) if weight.dtype == mx.float32 else weight


def guess(tokens: list[int], right: float, draw: random.Random) -> tuple[int, ...]:
    return tuple(token if draw.random() < right else draw.randrange(250) for token in tokens)


def some_rows(draw: random.Random, most: int, options: list[dict[str, Any]]) -> list[SequenceSpec]:
    rows: list[SequenceSpec] = []
    for at in range(draw.randint(1, most)):
        prompt = prompt_of(draw.choice([1, 2, 9, 30, 70]), seed=draw.randrange(3))
        chosen = {"max_tokens": draw.choice([1, 2, 9, 33]), "seed": at} | draw.choice(options)
        each = spec(f"s{at}", prompt, **chosen)
        of = draw.choice(["interactive", "batch"])
        rows.append(msgspec.structs.replace(each, sequence_class=of, group=draw.choice(["", "g"])))
    return rows


def resubmit(bench: Bench, rows: list[SequenceSpec]) -> None:
    """Set all rows aside that run, and submit them again with what they have told."""
    running = [each for each in rows if each.id in bench.engine.rows]
    bench.engine.set_aside([each.id for each in running])
    bench.turn()
    for each in running:
        told_so_far = tuple(bench.events.get(each.id, []))
        if not told_so_far or told_so_far[-1].finish is None:
            bench.submit(each, prior=told_so_far, attempt=3)


def accepted_unchanged(loaded: LoadedModel, seed: int, config: SpeculationConfig) -> int:
    """The same rows without drafts and with, in another order of things; how many drafted tokens held."""
    draw = random.Random(seed)
    bits = {packing.bits for packing in loaded.kv.packings if packing is not None}
    close = max((PACKED_CLOSE[each] for each in bits), default=CLOSE)
    rows = some_rows(draw, 6, [each for each in OPTIONS if not bits or not each.get("temperature")])
    plain = Bench(loaded, prefix_cache_bytes=0)
    plain.submit(*rows)
    plain.run()
    right = draw.choice([0.0, 0.6, 0.9, 1.0])
    rows = [msgspec.structs.replace(each, prediction_ids=guess(plain.tokens(each.id), right, draw)) for each in rows]
    chunk, kept = draw.choice([4, 64]), draw.choice([0, 1 << 24])
    config = replace(config, reads_beside=bool(seed % 2))
    when = random.Random(f"{seed} shared").choice(["auto", "always"])
    drafting = Bench(
        loaded, speculation=config, prefill_chunk=chunk, prefix_cache_bytes=kept, block_size=4, share_prompts=when
    )
    drafting.engine.batch._tells_at_once = draw.random() < 0.5
    cancelled: set[str] = set()
    for each in rows:
        taken = draw.randrange(len(plain.events[each.id])) if draw.random() < 0.3 else 0  # by an earlier attempt
        prior = tuple(plain.events[each.id][:taken])
        drafting.events[each.id] = list(prior)
        drafting.submit(each, prior=prior, attempt=2)
        for _ in range(draw.choice([0, 1, 3])):
            drafting.turn()
        if draw.random() < 0.15:
            drafting.engine.clear_cache(rows=True)  # rows begin again
        if draw.random() < 0.3:
            resubmit(drafting, rows)
        if draw.random() < 0.1:
            cancelled.add(each.id)
            drafting.engine.cancel(each.id)
    drafting.run()
    for each in rows:
        if each.id in cancelled and drafting.finish(each.id).reason == "cancelled":
            tokens = drafting.tokens(each.id)
            assert tokens == plain.tokens(each.id)[: len(tokens)]
            continue
        ours, theirs = drafting.events[each.id], plain.events[each.id]
        if (at := first_difference(drafting.tokens(each.id), plain.tokens(each.id))) is not None:
            assert is_on_edge(loaded, each, plain.tokens(each.id)[: at + 1], close / 5)
            assert drafting.logprobs(each.id)[:at] == pytest.approx(plain.logprobs(each.id)[:at], abs=close)
            continue
        assert outcome(ours) == outcome(theirs)
        apart = [abs(one - other) for one, other in zip(numbers(ours), numbers(theirs), strict=True)]
        if max(apart, default=0.0) > close:
            by_rounding = moves(loaded, each, plain.tokens(each.id))
            assert all(one <= max(close, 2 * other) for one, other in zip(apart, by_rounding, strict=True)), apart
    return drafting.engine.stats().speculation.accepted


def predicted(bench: Bench, *rows: SequenceSpec) -> list[SequenceSpec]:
    """The rows with what they will write, and what that is, by a bench without drafts."""
    bench.submit(*rows)
    bench.run()
    return [msgspec.structs.replace(each, prediction_ids=tuple(bench.tokens(each.id))) for each in rows]
