"""Decode speed of a batch of 8 rows of which 0, 4 or 8 follow a JSON schema: `python -m tests.bench.structured`.

All run in turn in one process on the same model; a ratio is speed with grammars / speed without. The schema allows no
end before the last token, so every run decodes the same number of tokens.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import mlx.core as mx

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.sequences import SamplingParams, SequenceSpec
from shared.text import grammar
from tests.bench.engine import prompts
from tests.engine.small_models import QWEN3_BENCH, TINY_SHAPE, write_model
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

ROWS, TOKENS, ROUNDS = 8, 96, 7
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "at": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
        "required": ["name", "at", "kind"],
        "additionalProperties": False,
    },
}
GRAMMAR = grammar.of_schema(SCHEMA)


def speed(loaded: LoadedModel, constrained: int) -> float:
    """Tokens per second of the engine, prefill and compilation included once they are warm."""
    engine = Engine(loaded, EngineConfig("", max_rows=ROWS, prefill_rows=ROWS, prefill_chunk=4096))
    ids = prompts(ROWS)

    def run(name: str, tokens: int) -> float:
        requests = []
        for at in range(ROWS):
            limited = at < constrained
            params = SamplingParams(tokens, at, ignore_eos=not limited, grammar=GRAMMAR if limited else "")
            requests.append(RowRequest(SequenceSpec(f"{name}{at}", "m", tuple(ids[at]), params)))
        began, count = time.perf_counter(), 0
        engine.submit(requests)
        while engine.busy:
            count += sum(len(event.tokens) for event in engine.turn().events)
        assert count == ROWS * tokens, count
        return count / (time.perf_counter() - began)

    run("warm", 4)
    result = run("s", TOKENS)
    engine.close()
    return result


def main() -> None:
    """Compare on each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", action="append", default=[], help="model folders instead of the random ones")
    args = parser.parse_args()
    print(f"{mx.default_device()}, {ROWS} rows, min-median-max of {args.rounds}")
    with tempfile.TemporaryDirectory() as folder:
        models = args.model
        if not models:
            write_model(Path(folder) / "tiny", TINY_SHAPE)
            write_model(Path(folder) / "qwen3", QWEN3_BENCH)
            models = [f"{folder}/tiny", f"{folder}/qwen3"]
        for path in models:
            name, loaded = Path(path).name, replace(load_model(EngineConfig(path)), kv_limit_bytes=1 << 40)
            speed(loaded, 0), speed(loaded, ROWS)
            rounds = [[speed(loaded, constrained) for constrained in (0, 4, 8)] for _ in range(args.rounds)]
            plain = median(each[0] for each in rounds)
            print(f"{name}: {plain:,.0f} tok/s without a grammar", flush=True)
            for at, constrained in ((1, 4), (2, 8)):
                ratios = sorted(each[at] / each[0] for each in rounds)
                print(
                    f"  {constrained} of {ROWS} rows: {ratios[0]:.2f}-{median(ratios):.2f}-{ratios[-1]:.2f}", flush=True
                )


if __name__ == "__main__":
    main()
