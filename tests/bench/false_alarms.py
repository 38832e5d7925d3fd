"""How often a sound worker would be found wrong: `python -m tests.bench.false_alarms [--tokens 1000000]`.

Two engines of one model in this process take the place of two workers. One draws sequences of random prompts in full
batches, in four ways; the other computes them again, many at once and in other company, by the court's own code
(shared/redis/queue/replayer.py) with its own bound; only the queue between them is missing. Tokens by verdict are
printed after each round, and the largest gap that was judged the same. Exit code 1 if a token was found wrong.

`--cost` computes rounds again as a court does, one sequence after another, and prints the CPU time of this process for
that over the one for writing them in full batches: the court's share of a worker's work is this times --replay-share.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any, cast

from mlx_model.config import EngineConfig
from mlx_model.device import backend
from mlx_model.loader import LoadedModel, load_model
from shared.frames import TokenEvent, VersionSpan
from shared.redis.queue.replayer import Replayer
from shared.redis.queue.sequence_calls import SequenceCalls
from shared.redis.recordings import Recording
from shared.replay import bound_of
from shared.replay_report import ReplayReport
from shared.sequences import Claim, SamplingParams, SequenceResult, SequenceSpec
from tests.bench.replay import WAYS
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest
from worker.rows import ClaimedRow

ROWS, ROUND = 32, 128  # of a batch; sequences of a round
PROMPT, COMPLETION = (4, 96), (32, 160)  # shortest and longest


class EngineCalls:
    """`SequenceCalls` of one engine: what is called at the same time is computed in one batch."""

    owner = "replays"

    def __init__(self, loaded: LoadedModel, name: str) -> None:
        self._engine = Engine(loaded, EngineConfig("", max_rows=ROWS, prefill_chunk=128, prefix_cache_bytes=0))
        self._name = name
        self._waiting: dict[str, tuple[SequenceSpec, list[TokenEvent], asyncio.Future[SequenceResult]]] = {}
        self._runs: asyncio.Task[None] | None = None

    async def call(self, specs: list[SequenceSpec], prefer: tuple[str, ...] = ()) -> list[SequenceResult]:
        """Compute them, and wait for all."""
        ends = [asyncio.get_running_loop().create_future() for _ in specs]
        for spec, end in zip(specs, ends, strict=True):
            given = ClaimedRow.after(Claim(spec, "", "", 1), []).events  # of its `prior_ids`
            self._waiting[spec.id] = (spec, list(given), end)
            self._engine.submit([RowRequest(spec, 1, tuple(given))])
        if self._runs is None or self._runs.done():
            self._runs = asyncio.create_task(self._run())
        return list(await asyncio.gather(*ends))

    async def _run(self) -> None:
        try:
            await self._turns()
        except BaseException as error:
            for _, _, end in self._waiting.values():
                end.set_exception(error)
            raise

    async def _turns(self) -> None:
        while self._engine.busy:
            for event in self._engine.turn().events:
                spec, events, end = self._waiting[event.seq]
                events.append(event)
                if event.finish is not None:
                    end.set_result(self._result(spec, events))
                    del self._waiting[event.seq]
            await asyncio.sleep(0)

    def _result(self, spec: SequenceSpec, events: list[TokenEvent]) -> SequenceResult:
        finish = events[-1].finish
        assert finish is not None and not finish.failure, finish
        ids = tuple(token for event in events for token in event.tokens)
        return SequenceResult(
            spec.id,
            finish,
            self._name,
            1,
            len(spec.prompt_ids),
            ids,
            tuple(logprob for event in events for logprob in event.logprobs),
            tuple(each for event in events for each in event.top_logprobs or ()),
            (VersionSpan("", 0, len(ids)),),
        )


def specs_of(round_: int, vocab: int) -> list[SequenceSpec]:
    """Sequences of one round."""
    lots, ways = random.Random(round_), list(WAYS.values())
    found = []
    for at in range(ROUND):
        way: dict[str, Any] = ways[at % len(ways)]
        prompt = tuple(lots.randrange(vocab) for _ in range(lots.randint(*PROMPT)))
        sampling = SamplingParams(lots.randint(*COMPLETION), lots.randrange(2**31), ignore_eos=True, **way)
        found.append(SequenceSpec(f"{round_}-{at}", "m", prompt, sampling))
    return found


async def measure(loaded: LoadedModel, tokens: int, bound: float) -> int:
    """The number of tokens found wrong."""
    first, second = EngineCalls(loaded, "first"), EngineCalls(loaded, "second")
    replayer = Replayer(cast(SequenceCalls, second), loaded.card)
    counts, largest, began, round_ = Counter[str](), 0.0, time.monotonic(), 0
    while counts["tokens"] < tokens:
        specs = specs_of(round_, loaded.card.vocab_size)
        written = await first.call(specs)
        recordings = [Recording(spec, result) for spec, result in zip(specs, written, strict=True)]
        reports: list[ReplayReport] = await asyncio.gather(*(replayer.replay(each, bound) for each in recordings))
        for report in reports:
            for name in ("tokens", "same", "ties", "wrong", "not_judged"):
                counts[name] += getattr(report, name)
            largest = max(largest, report.largest_gap)
            if report.wrong:
                print(f"WRONG: {report}", flush=True)
        round_ += 1
        sums = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        took = time.monotonic() - began
        print(
            f"{sums}; {round_ * ROUND} sequences; largest gap {largest:.2g}, bound {bound:g}; {took:.0f} s", flush=True
        )
    return counts["wrong"]


async def cost(loaded: LoadedModel, bound: float) -> None:
    """Print what it costs to check, over what it costs to write."""
    first, second = EngineCalls(loaded, "first"), EngineCalls(loaded, "second")
    replayer = Replayer(cast(SequenceCalls, second), loaded.card)
    for round_ in range(3):
        specs, began = specs_of(round_, loaded.card.vocab_size)[:ROWS], time.process_time()
        written, middle = await first.call(specs), time.process_time()
        for spec, result in zip(specs, written, strict=True):
            await replayer.replay(Recording(spec, result), bound)
        ratio = (time.process_time() - middle) / (middle - began)
        kind = "warm-up" if not round_ else "round"
        print(f"{kind}: {ROWS} checks, one by one, took {ratio:.2f} of the CPU time of writing them at once; "
              f"at a share of 0.001 that is {ratio / 10:.2f}% of it", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--cost", action="store_true")
    args = parser.parse_args()
    loaded = load_model(EngineConfig(args.model, dtype=args.dtype or None))
    print(f"{backend()}, {loaded.card.dtype}", flush=True)
    if args.cost:
        asyncio.run(cost(loaded, bound_of(loaded.card.dtype)))
        return 0
    return int(asyncio.run(measure(loaded, args.tokens, bound_of(loaded.card.dtype))) > 0)


if __name__ == "__main__":
    sys.exit(main())
