"""Tries what `--batch-invariant` promises of a model on this machine, for `mlx_parallm doctor --batch-invariant`.

`python -m worker.invariance --model M` lets an engine compute sequences one by one, then all of them in one batch that
they join and leave at different times, and compares every bit of tokens and log-probabilities. It prints JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

from mlx_model import fast_blas

fast_blas.install()

from mlx_model.config import EngineConfig  # noqa: E402  # after the faster BLAS
from mlx_model.device import backend  # noqa: E402
from mlx_model.loader import LoadedModel, load_model  # noqa: E402
from shared.errors import SetupError  # noqa: E402
from shared.sequences import SamplingParams, SequenceSpec  # noqa: E402
from worker.engine.engine import Engine  # noqa: E402
from worker.engine.messages import RowRequest  # noqa: E402

LONGEST, MOST_TOKENS = 80, 24  # ids of a prompt, and tokens of a completion
JOINS = 0.4  # chance that the next sequence joins in a turn
Bits = dict[str, list[tuple[list[int], list[float]]]]  # by sequence: tokens and log-probabilities


def specs(vocab: int, count: int) -> list[SequenceSpec]:
    """Sequences of random prompts and lengths: greedy ones, drawn ones, and some with filters."""
    lots = random.Random(0)
    samplings: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    )
    return [
        SequenceSpec(
            f"s{at}",
            "m",
            tuple(lots.randrange(vocab) for _ in range(lots.randint(1, LONGEST))),
            SamplingParams(lots.randint(1, MOST_TOKENS), at, ignore_eos=True, **samplings[at % 3]),
        )
        for at in range(count)
    ]


def computed(loaded: LoadedModel, sequences: list[SequenceSpec], joins: float) -> Bits:
    """Tokens and log-probabilities of an engine without a prefix cache.

    `joins`: the chance that the next sequence joins in a turn.
    """
    config = EngineConfig("", batch_invariant=True, max_rows=len(sequences), prefill_chunk=48, prefix_cache_bytes=0)
    engine, lots, found = Engine(loaded, config), random.Random(1), Bits()
    waiting = list(sequences)
    while waiting or engine.busy:
        if waiting and (not engine.busy or lots.random() < joins):
            engine.submit([RowRequest(waiting.pop(0), 1, ())])
        for event in engine.turn().events:
            found.setdefault(event.seq, []).append((event.tokens, event.logprobs))
    engine.close()
    return found


def different(loaded: LoadedModel, sequences: list[SequenceSpec]) -> list[str]:
    """Ids of the sequences whose tokens or log-probabilities depend on the others."""
    together = computed(loaded, sequences, JOINS)
    return [each.id for each in sequences if _flat(computed(loaded, [each], 1.0)[each.id]) != _flat(together[each.id])]


def _flat(events: list[tuple[list[int], list[float]]]) -> list[tuple[int, float]]:
    return [pair for tokens, logprobs in events for pair in zip(tokens, logprobs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.invariance")
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequences", type=int, default=24)
    args = parser.parse_args()
    try:
        loaded = load_model(EngineConfig(args.model, batch_invariant=True))
    except SetupError as error:
        print(json.dumps({"why": str(error)}))
        sys.exit(0)
    sequences = specs(loaded.card.vocab_size, args.sequences)
    tokens = sum(each.sampling.max_tokens for each in sequences)
    print(json.dumps({"backend": backend(), "tokens": tokens, "different": different(loaded, sequences)}))


if __name__ == "__main__":
    main()
