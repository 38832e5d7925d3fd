"""What `--batch-invariant` costs: `python -m tests.bench.invariance [--model FOLDER] [--rows 1 4 16]`.

Decode steps of rows with the flag, over those without it, and prompts, in turn in one process: minimum, median and
maximum of the ratio of tokens per second, on a CPU of the process's own time. Without --model a model with random
weights in memory.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import time
from dataclasses import replace
from statistics import median

from mlx_model.config import EngineConfig
from mlx_model.device import on_cpu
from mlx_model.kv.layout import layout_of
from mlx_model.loader import LoadedModel, load_model
from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.adapters import SHAPES, random_model
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

CLOCK = time.process_time if on_cpu() else time.perf_counter
WARM = 2  # tokens of each row before those that are timed


class Rows:
    """Rows of different prompts in an engine; half of them are drawn, half greedy."""

    def __init__(self, loaded: LoadedModel, rows: int, prompt: int, tokens: int) -> None:
        self._engine = Engine(loaded, EngineConfig("", max_rows=rows, prefill_chunk=512, prefix_cache_bytes=0))
        self._rows, self._prompt, self._tokens = rows, prompt, tokens

    def speeds(self) -> tuple[float, float]:
        """Tokens per second of prompts until every row has its first tokens, and of decode steps after that."""
        requests = [
            SequenceSpec(
                f"s{at}",
                "m",
                tuple(3 + (7919 * place + 31 * at) % 4000 for place in range(self._prompt)),
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


def main() -> None:
    """Print a line for prompts and one for decode steps, by rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder; default: random weights")
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    usual = load_model(EngineConfig(args.model)) if args.model else random_model(SHAPES[args.shape], "float32")
    sides = [usual, replace(usual, kv=layout_of(usual.model, 0, 64, invariant=True))]
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


if __name__ == "__main__":
    main()
