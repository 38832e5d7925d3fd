"""Drafts on over off: `python -m tests.bench.speculation [--shape small|medium|0.6b|4b] [--rows 1 8 32]`.

Weights are random, so what would be accepted of a real model's text says nothing. So completions are recorded first,
without drafts, and given as predictions of which each token is right with a set chance: 1 is a copying task, 0 a text
that nobody could foresee. Tokens per second are ratios of runs in turn, in one process; tokens must be equal.

The last token decides the next one (`sure_model`), all layers notwithstanding. A model of random weights is never sure:
where 150,000 tokens have about equal chances, the last bits of a wider forward in bfloat16 make it draw another one
almost always, which models that have learned do seldom.

Both engines take turns in stretches, each of which ends when the GPU has done all that the stretch has begun. A step
without drafts is computed while its engine returns: turn for turn, the other one would wait for it.

Tokens per second count from the moment when all rows decode to the one when the first of them ends: after that fewer
rows share a step, and with drafts rows end apart.

`--mixed`: the same, with prompts of a quarter to all of the context. `--beside`: gaps and first tokens of rows without
drafts while as many rows copy, p99 with drafts over without. `--clock cpu` counts the process's CPU time in place of
the wall's, which says more on a CPU that others use, too; what drafts learn of step times is counted so, too.

Rows of a job (`--batch`, as rollouts are) may wait for one another's drafts, where others may not: of these only the
sum counts.

`--parts`: where a step's time goes, with drafts and without. With `--clock thread` and `--shape host` it is what the
engine's thread does itself, since MLX computes in another one on a CPU: as many operations as a model of 28 layers has
and next to no arithmetic.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Any

import mlx.core as mx

from mlx_model.config import EngineConfig, SpeculationConfig
from mlx_model.loader import LoadedModel
from shared.sequences import SamplingParams, SequenceClass, SequenceSpec
from tests.bench.adapters import SHAPES, random_model
from worker.engine.batch import running_batch
from worker.engine.batch.row_model import RowModel
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest
from worker.engine.scheduler import ChunkSize, PieceSizes
from worker.engine.speculation.batch import SpeculatingBatch
from worker.engine.speculation.drafting import Drafting
from worker.engine.warm_up import rehearse

AIMS = {(1, 1.0): "aim 2.0", (8, 1.0): "aim 1.4", (32, 0.0): "aim 0.97", (32, 0.7): "aim 0.97", (32, 1.0): "aim 0.97"}


HOST: dict[str, Any] = {
    **SHAPES["small"],
    "hidden_size": 64,
    "num_hidden_layers": 28,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time, "thread": time.thread_time}
STRIDE = 7919  # from a token to the next: prime, so that the vocabulary's end is reached before a token comes again
STRETCH = 24  # turns
SURE = 40.0  # the next token's logit; all others lie about 0


def sure_model(shape: dict[str, Any], dtype: str) -> LoadedModel:
    """A random model whose embeddings drown what its layers say, and whose head knows each token's successor."""
    loaded = random_model({**shape, "tie_word_embeddings": False}, dtype)
    model, size = loaded.model, shape["hidden_size"]
    embeddings_VD = mx.random.normal((shape["vocab_size"], size))
    model.model.embed_tokens.weight = (30 * embeddings_VD).astype(getattr(mx, dtype))
    model.lm_head.weight = (SURE / size * mx.roll(embeddings_VD, STRIDE, 0)).astype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return loaded


class Decoding:
    """Rows of one engine, past their prompts; tokens and seconds count until the first one ends."""

    def __init__(self, engine: Engine, requests: Sequence[RowRequest]) -> None:
        self._engine = engine
        self.written: dict[str, list[int]] = {each.spec.id: [] for each in requests}
        self.waits: dict[str, list[float]] = {}  # of each row: for its first token, then between two turns with some
        self._since: dict[str, float] = {}
        self.is_whole = True  # no row has ended
        self._begin()
        engine.submit(requests)
        while not all(self.written.values()):
            self.turn()
        if not self.is_whole:
            raise SystemExit("a row ended before all of them decoded: give --tokens more")
        self.waits.clear()
        self._begin()
        self._since = dict.fromkeys(self.written, 0.0)

    def _begin(self) -> None:
        self.tokens = self.turns = 0  # turns: once for each row that gets tokens
        self.seconds = self._now = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether rows are left."""
        return self._engine.busy

    def arrive(self, request: RowRequest) -> None:
        """One more, now."""
        self.written[request.spec.id], self._since[request.spec.id] = [], self._now
        self._engine.submit([request])

    def rest(self) -> None:
        """Wait for what the turns so far have begun."""
        began = clock()
        mx.synchronize(self._engine._batch.stream)
        if self.is_whole:
            self.seconds += clock() - began

    def turn(self) -> None:
        """One turn, timed."""
        began = clock()
        events = self._engine.turn().events
        self._engine.settle()
        seconds = clock() - began
        self._now += seconds
        for event in events:
            self.written[event.seq] += event.tokens
            self.waits.setdefault(event.seq, []).append(self._now - self._since.get(event.seq, 0.0))
            self._since[event.seq] = self._now
        if self.is_whole:
            self.seconds += seconds
            self.tokens += sum(len(event.tokens) for event in events)
            self.turns += sum(bool(event.tokens) for event in events)
            self.is_whole = all(event.finish is None for event in events)


class Parts:
    """What the engine's thread spends on parts of a step, ms; one inside another counts for itself."""

    def __init__(self) -> None:
        self.each: dict[str, float] = {}
        self._inner = [0.0]
        self._is_on = False
        for name, owner, methods in (
            ("drafts", Drafting, ("tries", "drafts", "ahead", "checked")),
            ("building", RowModel, ("__call__",)),
            ("giving out", mx, ("async_eval",)),
            ("taking back", SpeculatingBatch, ("_take_back",)),
            ("telling", running_batch, ("report_tokens",)),
        ):
            for method in methods:
                setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if not self._is_on:
                return call(*args, **options)
            began = clock()
            self._inner.append(0.0)
            try:
                return call(*args, **options)
            finally:
                took, inner = clock() - began, self._inner.pop()
                self._inner[-1] += took
                self.each[name] = self.each.get(name, 0.0) + 1000 * (took - inner)

        return timed

    def turns(self, run: Decoding, count: int) -> tuple[int, dict[str, float]]:
        """Take at most so many turns of a run; how many, and what they took."""
        self.each, self._is_on = {}, True
        began, done = clock(), 0
        while run.is_whole and done < count:
            run.turn()
            done += 1
        run.rest()
        self._is_on = False
        return done, {**self.each, "rest": 1000 * (clock() - began) - sum(self.each.values())}


class AtOnce(PieceSizes):
    """Prompts are read at once, also those of a job: rows that decode beside others' would end before all decode."""

    def piece(self, budget: int) -> int:
        return budget


class Runs:
    """One engine with drafts and one without, over the same prompts."""

    def __init__(
        self,
        loaded: LoadedModel,
        rows: int,
        tokens: int,
        context: int,
        drafts: SpeculationConfig,
        *,
        mixed: bool,
        batch: bool,
    ) -> None:
        config = EngineConfig(
            "", max_rows=rows + 1, prefill_rows=rows, prefill_chunk=rows * context, prefix_cache_bytes=0
        )
        self._loaded, self._config = loaded, replace(config, speculation=drafts)
        self._plain, self._drafting = Engine(loaded, config), Engine(loaded, self._config)
        for each in (self._plain, self._drafting):
            each._pieces.pace, each._pieces.chunk = AtOnce(), ChunkSize(rows * context, math.inf)
        self._drafting.drafting._clock = self._own_clock
        self._elsewhere = 0.0
        self._rows, self._tokens, self._context, self._vocab = rows, tokens, context, loaded.card.vocab_size
        self._least = context // 4 if mixed else context
        self._class: SequenceClass = "batch" if batch else "interactive"
        self._forget()

    def _own_clock(self) -> float:
        """Without what the engine that does not draft has taken in between: it is no part of a step."""
        return clock() - self._elsewhere

    def _forget(self) -> None:
        self.drafted = self.accepted = self.changed = self.tokens = self.turns = 0

    @property
    def tokens_a_forward(self) -> float:
        """That a row got of a forward with drafts on, on average."""
        return self.tokens / self.turns

    def warm_up(self, *, rehearses: bool = True) -> None:
        """Check drafts, on a GPU first as a worker does, so that no kernel is compiled in a step that counts."""
        if rehearses and mx.default_device() != mx.Device(mx.cpu):
            list(rehearse(self._loaded, self._config))
        drafting = self._drafting.drafting
        config = drafting._config
        drafting._config = replace(config, adapts_to_time=False, adapts_to_rows=False)
        self._both([0.5] * self._rows, 1000, every=0)
        drafting._config = config
        self._forget()

    def ratio(self, chance: float, seed: int) -> float:
        """Tokens per second with drafts of such a chance over those without; stretches of both alternate."""
        plain, drafting = self._both([chance] * self._rows, seed, every=0)
        return drafting.tokens / drafting.seconds / (plain.tokens / plain.seconds)

    def waits(self, seed: int) -> tuple[float, float]:
        """Of rows without drafts beside as many that copy: p99 of gaps and of first tokens, over those without."""
        half = self._rows // 2
        both = self._both([1.0] * half + [0.0] * (self._rows - half), seed, every=8)
        gaps, firsts = [], []
        for each in both:
            waits = {seq: waits for seq, waits in each.waits.items() if not seq.isdecimal() or int(seq) >= half}
            gaps.append(_p99([gap for seq, all_ in waits.items() for gap in all_[not seq.isdecimal() :]]))
            firsts.append(_p99([all_[0] for seq, all_ in waits.items() if not seq.isdecimal()]))
        return gaps[1] / gaps[0], firsts[1] / firsts[0]

    def parts(self, parts: Parts, chance: float, seed: int) -> None:
        """Print them of steps without drafts and of steps with, a few of each in turn: a host is slow for seconds."""
        runs = dict(zip(("without", "with"), self._begun([chance] * self._rows, seed), strict=True))
        for run in runs.values():
            parts.turns(run, STRETCH // 3)
        turns = dict.fromkeys(runs, 0)
        total: dict[str, Counter[str]] = {name: Counter() for name in runs}
        while all(run.is_whole for run in runs.values()):
            for name, run in runs.items():
                done, each = parts.turns(run, STRETCH // 3)
                turns[name] += done
                total[name].update(each)
        for name, run in runs.items():
            each_ms = {part: took / max(1, turns[name]) for part, took in total[name].items()}
            shown = ", ".join(f"{part} {took:.2f}" for part, took in each_ms.items())
            print(f"{self._rows:3} rows, a step {name} drafts: {sum(each_ms.values()):.2f} ms: {shown}", flush=True)
            while run.is_busy:
                run.turn()

    def _both(self, chances: Sequence[float], seed: int, every: int) -> tuple[Decoding, Decoding]:
        """The runs without and with drafts; one more short request comes to both in `every` so many turns."""
        before = self._drafting.stats().speculation
        plain, drafting = self._begun(chances, seed)
        for begin in count(1, STRETCH):
            for each in (plain, drafting):
                began = clock()
                for turn in range(begin, begin + STRETCH):
                    if every and turn % every == 0 and turn < self._tokens:
                        each.arrive(self._late(turn))
                    if each.is_busy:
                        each.turn()
                each.rest()
                self._elsewhere += clock() - began if each is plain else 0.0
            if not (plain.is_busy or drafting.is_busy):
                break
        after = self._drafting.stats().speculation
        self.changed += sum(plain.written[seq] != drafting.written[seq] for seq in plain.written)
        self.drafted += after.drafted - before.drafted
        self.accepted += after.accepted - before.accepted
        self.tokens += drafting.tokens
        self.turns += drafting.turns
        return plain, drafting

    def _begun(self, chances: Sequence[float], seed: int) -> tuple[Decoding, Decoding]:
        """The same rows without drafts and with, past their prompts."""
        draw = random.Random(seed)
        lengths = [draw.randint(self._least, self._context) for _ in chances]
        prompts = [tuple(draw.randrange(3, self._vocab) for _ in range(length)) for length in lengths]
        recorded = Decoding(self._plain, self._requests(prompts, [()] * self._rows, seed))
        while recorded.is_busy:
            recorded.turn()
        guesses = [
            tuple(id_ if draw.random() < chance else draw.randrange(3, self._vocab) for id_ in each) if chance else ()
            for chance, each in zip(chances, recorded.written.values(), strict=True)
        ]
        plain = Decoding(self._plain, self._requests(prompts, [()] * self._rows, seed))
        return plain, Decoding(self._drafting, self._requests(prompts, guesses, seed))

    def _late(self, turn: int) -> RowRequest:
        """A short request that comes in that turn."""
        draw = random.Random(turn)
        late = tuple(draw.randrange(3, self._vocab) for _ in range(32))
        return RowRequest(
            SequenceSpec(f"late {turn}", "m", late, SamplingParams(4, turn, temperature=1.0, ignore_eos=True))
        )

    def _requests(
        self, prompts: Sequence[tuple[int, ...]], guesses: Sequence[tuple[int, ...]], seed: int
    ) -> list[RowRequest]:
        return [
            RowRequest(
                SequenceSpec(
                    str(at),
                    "m",
                    prompt,
                    SamplingParams(self._tokens, seed + at, temperature=1.0, ignore_eos=True),
                    prediction_ids=guess,
                    sequence_class=self._class,
                )
            )
            for at, (prompt, guess) in enumerate(zip(prompts, guesses, strict=True))
        ]


def _p99(waits: Sequence[float]) -> float:
    return sorted(waits)[int(0.99 * (len(waits) - 1))]


def clock() -> float:
    """Seconds, of the clock that is asked for."""
    return _clock()


_clock = time.perf_counter


def main() -> None:
    """A table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, "host"], default="medium")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--chances", type=float, nargs="+", default=[1.0, 0.7, 0.0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--draft", type=int, default=7, help="tokens of a draft, at most")
    parser.add_argument("--rounds", type=int, default=3)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--always", action="store_true", help="draft whatever it takes (--no-adaptive-k)")
    parser.add_argument("--batch", action="store_true", help="rows of a job, such as rollouts")
    parser.add_argument("--at-once", action="store_true", help="each check is read before the next one is given out")
    parser.add_argument("--unrehearsed", action="store_true", help="on a GPU: rounds compile kernels, too")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    args = parser.parse_args()
    global _clock
    _clock = CLOCKS[args.clock]
    loaded = sure_model({**SHAPES, "host": HOST}[args.shape], args.dtype)
    parts = Parts() if args.parts else None
    for rows in args.rows:
        config = SpeculationConfig(args.draft, adapts_to_time=not args.always, overlaps=not args.at_once)
        sizes = loaded, rows, args.tokens, args.context, config
        if args.beside:
            _show_waits(rows, Runs(*sizes, mixed=args.mixed, batch=args.batch), args.rounds)
            continue
        for chance in args.chances:
            runs = Runs(*sizes, mixed=args.mixed, batch=args.batch)
            runs.warm_up(rehearses=not args.unrehearsed)
            if parts is not None:
                runs.parts(parts, chance, 99)
            ratios = []
            for seed in range(args.rounds):
                ratios.append(runs.ratio(chance, seed))
                print(f"{rows:3} rows, predictions right in {chance:.0%}: round {seed}: x {ratios[-1]:.2f}", flush=True)
            if not ratios:
                continue
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(
                f"{rows:3} rows, predictions right in {chance:.0%}: x {median(ratios):.2f} ({shown}), accepted "
                f"{runs.accepted} of {runs.drafted}, {runs.tokens_a_forward:.2f} tokens a forward "
                f"(at best {_at_best(chance, args.draft):.2f}), {runs.changed} rows changed "
                f"{AIMS.get((rows, chance), '')}",
                flush=True,
            )


def _at_best(chance: float, draft: int) -> float:
    """Tokens of a forward where every one checks so long a draft, at the right place."""
    return sum(chance**at for at in range(draft + 1))


def _show_waits(rows: int, runs: Runs, rounds: int) -> None:
    runs.warm_up()
    each = [runs.waits(seed) for seed in range(rounds)]
    for at, name in enumerate(("gaps", "first tokens")):
        shown = " ".join(f"{ratios[at]:.2f}" for ratios in each)
        print(
            f"{rows:3} rows, half of them copy: p99 of the others' {name} "
            f"x {median(ratios[at] for ratios in each):.2f} ({shown}) aim 1.1",
            flush=True,
        )


if __name__ == "__main__":
    main()
