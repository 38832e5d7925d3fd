"""Replays: what is generated in a full batch by one of two workers and computed again by the other, token by token.

`python -m tests.bench.replay [--model models/tiny] [--dtype bfloat16] [--batch-invariant] [--sequences 64]
[--tokens 64] [--rounds 1]` prints the tokens by verdict, and the gaps of those that are not the same at once:
shared/replay.py's bounds stand on them. `--bound 0.001` counts those that a court would call wrong; every round has
other seeds and prompts, and after each one the sums of all are printed.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.rings import ring

WAYS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    "penalties": {"temperature": 1.2, "repetition_penalty": 1.2, "min_p": 0.05},
}
AT_ONCE = 32  # replays


COUNTED = ("tokens", "same", "ties", "wrong", "not_judged")


async def measure(
    client: httpx.AsyncClient, model: str, seeds: range, tokens: int, way: dict[str, Any], bound: float
) -> tuple[Counter[str], float, str]:
    """Generate them all at once, then replay each; the counts, the largest gap and a line of figures."""

    async def generated(seed: int) -> str:
        body = {"model": model, "prompt": f"Question {seed}:", "max_tokens": tokens, "seed": seed, "ignore_eos": True}
        return str((await _asked(client, "/v1/completions", body | way))["id"])

    begin = time.monotonic()
    names = await asyncio.gather(*map(generated, seeds))
    middle, places = time.monotonic(), asyncio.Semaphore(AT_ONCE)

    async def replayed(name: str) -> dict[str, Any]:
        async with places:
            (report,) = (await _asked(client, "/v1/replay", {"id": name, "bound": bound}))["data"]
            return dict(report)

    reports = await asyncio.gather(*map(replayed, names))
    counts = Counter[str]()
    for report in reports:
        counts.update({name: report[name] for name in COUNTED})
    gaps = sorted(each["gap"] for report in reports for each in report.get("differences", ()))
    largest = max(report["largest_gap"] for report in reports)
    elsewhere = sum(report["worker"] not in report["replayed_by"] for report in reports)
    line = (
        f"{counts['tokens']} tokens: {counts['same']} same, {counts['ties']} drawn otherwise, {counts['wrong']} wrong, "
        f"gaps {gaps[-5:]}, largest {largest:.2g}; {elsewhere} of {len(seeds)} by another worker; "
        f"replays took {(time.monotonic() - middle) / (middle - begin):.1f} of the time"
    )
    return counts, largest, line


async def _asked(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    while True:
        reply = await client.post(path, json=body)
        if reply.status_code != 503:  # a busy machine says so now and then
            return reply.raise_for_status().json()
        await asyncio.sleep(1)


async def measure_all(url: str, args: argparse.Namespace) -> None:
    """Print a line for each way to draw, and the sums of all rounds so far."""
    total, largest = Counter[str](), 0.0
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        for at in range(args.rounds):
            seeds = range(at * args.sequences, (at + 1) * args.sequences)
            for name, way in WAYS.items():
                counts, gap, line = await measure(client, args.model.name, seeds, args.tokens, way, args.bound)
                total, largest = total + counts, max(largest, gap)
                print(f"{name}: {line}", flush=True)
            sums = ", ".join(f"{total[name]} {name}" for name in COUNTED)
            print(f"{at + 1} rounds, bound {args.bound:g}: {sums}; largest gap {largest:.2g}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Start a ring of two workers and measure there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--dtype", default="")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bound", type=float, default=1.0, help="of probability; 1: no gap is too large to be shown")
    args = parser.parse_args(argv)
    flags = ["--workers", "2", "--record-ttl-s", "3600", *(["--dtype", args.dtype] if args.dtype else [])]
    flags += ["--batch-invariant"] if args.batch_invariant else []
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder), *flags, model=args.model) as started:
        asyncio.run(measure_all(started.url, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
