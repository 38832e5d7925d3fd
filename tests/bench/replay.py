"""Replays: what is generated in a full batch by one of two workers and computed again by the other, token by token.

`python -m tests.bench.replay [--model models/tiny] [--dtype bfloat16] [--batch-invariant] [--sequences 64]
[--tokens 64]` prints the tokens by verdict, and the gaps of those that are not the same at once: shared/replay.py's
bounds stand on them.
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
AT_ONCE = 8  # replays


async def measure(client: httpx.AsyncClient, model: str, sequences: int, tokens: int, way: dict[str, Any]) -> str:
    """Generate them all at once, then replay each; a line of figures."""

    async def generated(seed: int) -> str:
        body = {"model": model, "prompt": f"Question {seed}:", "max_tokens": tokens, "seed": seed, "ignore_eos": True}
        return str((await client.post("/v1/completions", json=body | way)).raise_for_status().json()["id"])

    begin = time.monotonic()
    names = await asyncio.gather(*map(generated, range(sequences)))
    middle, places = time.monotonic(), asyncio.Semaphore(AT_ONCE)

    async def replayed(name: str) -> dict[str, Any]:
        async with places:
            reply = await client.post("/v1/replay", json={"id": name, "bound": 1.0})
            (report,) = reply.raise_for_status().json()["data"]
            return dict(report)

    reports = await asyncio.gather(*map(replayed, names))
    counts = Counter[str]()
    for report in reports:
        counts.update({name: report[name] for name in ("tokens", "same", "ties", "not_judged")})
    gaps = sorted(each["gap"] for report in reports for each in report.get("differences", ()))
    largest = max(report["largest_gap"] for report in reports)
    elsewhere = sum(report["worker"] not in report["replayed_by"] for report in reports)
    return (
        f"{counts['tokens']} tokens: {counts['same']} same, {counts['ties']} drawn otherwise, gaps {gaps[-5:]}, "
        f"largest {largest:.2g}; {elsewhere} of {sequences} by another worker; "
        f"replays took {(time.monotonic() - middle) / (middle - begin):.1f} of the time"
    )


async def measure_all(url: str, model: str, sequences: int, tokens: int) -> None:
    """Print a line for each way to draw."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        for name, way in WAYS.items():
            print(f"{name}: {await measure(client, model, sequences, tokens, way)}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Start a ring of two workers and measure there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--dtype", default="")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(argv)
    flags = ["--workers", "2", "--record-ttl-s", "3600", *(["--dtype", args.dtype] if args.dtype else [])]
    flags += ["--batch-invariant"] if args.batch_invariant else []
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder), *flags, model=args.model) as started:
        asyncio.run(measure_all(started.url, args.model.name, args.sequences, args.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
