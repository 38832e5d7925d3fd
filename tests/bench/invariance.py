"""What `--batch-invariant` keeps and costs: `python -m tests.bench.invariance [--model FOLDER] [--rows 1 4 16]`.

First the proof: a greedy and a drawn row have the same tokens and log-probabilities, bit by bit, alone, beside 1, 5 and
15 others that come and go, with their prompt's beginning from the prefix cache, and continued by another engine, from
its tokens, after each of several positions. Exit code 1 if a bit differs. Without the flag the same is counted, for
comparison.

Then the cost: decode steps of rows with the flag, over those without it, and prompts, in turn in one process: minimum,
median and maximum of the ratio of tokens per second, on a CPU of the process's own time. Without --model a model with
random weights in memory.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import random
import sys
import time
from dataclasses import replace
from statistics import median

import msgspec

from mlx_model.config import EngineConfig
from mlx_model.device import backend, on_cpu
from mlx_model.kv.layout import layout_of
from mlx_model.loader import LoadedModel, load_model
from shared.frames import TokenEvent
from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.adapters import SHAPES, random_model
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

CLOCK = time.process_time if on_cpu() else time.perf_counter
WARM = 2  # tokens of each row before those that are timed
COMPANY = (1, 5, 15)  # other rows
JOINS = 0.3  # chance that the next one joins in a turn


class Rows:
    """Rows of different prompts in an engine; half of them are drawn, half greedy."""

    def __init__(self, loaded: LoadedModel, rows: int, prompt: int, tokens: int) -> None:
        self._engine = Engine(loaded, EngineConfig("", max_rows=rows, prefill_chunk=512, prefix_cache_bytes=0))
        self._rows, self._prompt, self._tokens, self._vocab = rows, prompt, tokens, loaded.card.vocab_size

    def speeds(self) -> tuple[float, float]:
        """Tokens per second of prompts until every row has its first tokens, and of decode steps after that."""
        requests = [
            SequenceSpec(
                f"s{at}",
                "m",
                tuple((7919 * place + 31 * at) % self._vocab for place in range(self._prompt)),
                SamplingParams(WARM + self._tokens, at, temperature=float(at % 2), ignore_eos=True),
            )
            for at in range(self._rows)
        ]
        began = CLOCK()
        self._engine.submit([RowRequest(each) for each in requests])
        self._until(WARM * self._rows)
        middle = CLOCK()
        done = self._until(self._rows * self._tokens // 2)
        end = CLOCK()
        while self._engine.busy:
            self._engine.turn()
        return self._rows * self._prompt / (middle - began), done / (end - middle)

    def _until(self, tokens: int) -> int:
        done = 0
        while done < tokens:
            done += sum(len(event.tokens) for event in self._engine.turn().events)
            self._engine.settle()
        return done


Bits = list[tuple[int, float]]  # tokens and their log-probabilities


class Proof:
    """Sequences that are computed in different company; the first way, alone, is what the others must show."""

    def __init__(self, loaded: LoadedModel, prompt: int, tokens: int) -> None:
        self._loaded, self._prompt, self._tokens = loaded, prompt, tokens

    def differences(self) -> dict[str, int]:
        """Tokens by way that are not, bit by bit, those that the row has alone."""
        return {name: sum(each[name] for each in map(self._of, (0.0, 1.0))) for name in self._of(0.0)}

    def _of(self, temperature: float) -> dict[str, int]:
        own, engine = self._spec("own", 1, temperature, self._prompt, self._tokens), self._engine(cached=True)
        events = self._run(engine, RowRequest(own))
        expected, found = _bits(events), dict[str, int]()
        again = self._run(engine, RowRequest(msgspec.structs.replace(own, id="again")))
        last = again[-1].finish
        assert last is not None and last.cached_tokens >= self._prompt // 2, "the prompt's beginning was not cached"
        found["from the prefix cache"] = _apart(_bits(again), expected)
        for count in COMPANY:
            found[f"beside {count}"] = _apart(_bits(self._run(self._engine(), RowRequest(own), count)), expected)
        cuts = (1, self._tokens // 2, self._tokens - 1)
        found["continued"] = sum(
            _apart(_bits(self._run(self._engine(), RowRequest(own, 2, _until(events, at)), 5)), expected[at:])
            for at in cuts
        )
        return found

    def _engine(self, *, cached: bool = False) -> Engine:
        size = 1 << 30 if cached else 0
        return Engine(self._loaded, EngineConfig("", max_rows=20, prefill_chunk=64, prefix_cache_bytes=size))

    def _run(self, engine: Engine, own: RowRequest, others: int = 0) -> list[TokenEvent]:
        """The events of a row, beside others of which half come before it and half while it decodes."""
        lots, events = random.Random(others), list[TokenEvent]()
        company = [
            self._spec(f"o{at}", 2 + at, at % 2, lots.randint(1, self._prompt), lots.randint(1, self._tokens))
            for at in range(others)
        ]
        engine.submit([RowRequest(each) for each in company[::2]])
        engine.turn()
        engine.submit([own])
        late = company[1::2]
        while engine.busy:
            for event in engine.turn().events:
                if event.seq == own.spec.id:
                    events.append(event)
            if late and lots.random() < JOINS:
                engine.submit([RowRequest(late.pop())])
        return events

    def _spec(self, id: str, seed: int, temperature: float, prompt: int, tokens: int) -> SequenceSpec:
        lots, vocab = random.Random(seed), self._loaded.card.vocab_size
        ids = tuple(lots.randrange(vocab) for _ in range(prompt))
        return SequenceSpec(id, "m", ids, SamplingParams(tokens, seed, temperature=temperature, ignore_eos=True))


def _bits(events: list[TokenEvent]) -> Bits:
    return [pair for event in events for pair in zip(event.tokens, event.logprobs, strict=True)]


def _apart(found: Bits, expected: Bits) -> int:
    assert len(found) == len(expected), f"{len(found)} tokens in place of {len(expected)}"
    return sum(a != b for a, b in zip(found, expected, strict=True))


def _until(events: list[TokenEvent], tokens: int) -> tuple[TokenEvent, ...]:
    """The events with a row's first tokens; each has one."""
    return tuple(msgspec.structs.replace(event, finish=None) for event in events if event.tokens)[:tokens]


def cost(sides: list[LoadedModel], args: argparse.Namespace) -> None:
    """Print a line for prompts and one for decode steps, by rows."""
    for rows in args.rows:
        batches = [Rows(loaded, rows, args.prompt, args.tokens) for loaded in sides]
        speeds = [[batch.speeds() for batch in batches] for _ in range(args.rounds)]
        for at, name in enumerate((f"prompts of {args.prompt}", "decode steps")):
            ratios = sorted(kept[at] / plain[at] for plain, kept in speeds)
            without, with_it = (median(each[side][at] for each in speeds) for side in (0, 1))
            print(
                f"{rows} rows, {name}: {ratios[0]:.2f} {median(ratios):.2f} {ratios[-1]:.2f}"
                f"   ({without:,.0f} -> {with_it:,.0f} tok/s)",
                flush=True,
            )


def main() -> int:
    """The proof, then the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder; default: random weights")
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--dtype", default="", help="default: float32 on a CPU, elsewhere bfloat16 of random weights")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16], help="of the cost; none: the proof alone")
    parser.add_argument("--no-proof", dest="proof", action="store_false")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    dtype = args.dtype or ("float32" if on_cpu() else "bfloat16")
    given = EngineConfig(args.model, dtype=args.dtype or None)
    usual = load_model(given) if args.model else random_model(SHAPES[args.shape], dtype)
    began = time.perf_counter()
    sides = [usual, replace(usual, kv=layout_of(usual.model, 0, 64, invariant=True))]
    broken = False
    for name, loaded in zip(("without the flag", "with it"), sides, strict=True) if args.proof else ():
        found = Proof(loaded, args.prompt, args.tokens).differences()
        broken = any(found.values())
        ways = ", ".join(f"{way} {count}" for way, count in found.items())
        print(f"{name}, tokens of {2 * args.tokens} whose bits differ from those alone: {ways}", flush=True)
    print(f"{backend()}, {usual.card.dtype}; {time.perf_counter() - began:.0f} s so far", flush=True)
    if args.rows:
        cost(sides, args)
        print(f"{time.perf_counter() - began:.0f} s")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
