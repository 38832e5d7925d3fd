"""Real workers with `--batch-invariant` are killed while they serve: what was begun goes on with the same bits.

`python -m tests.e2e.invariant_kills [--kills 10] [--model models/tiny]` starts two such workers. Streams that are drawn
with seeds show tokens and log-probabilities, which are known from before, when each ran alone. At random moments one of
the two workers is killed (`kill -9`); the other one, or the one that is started in its place, continues. A bit that
differs, in the part that another worker computed or before it, is counted; exit code 1 if there is one.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.rings import Ring, ring
from tests.waiting import HANG_S, wait_until

AT_ONCE, ASKED, TOKENS = 10, 24, 160  # streams, prompts, tokens of each
Drawn = list[tuple[int, float]]


def body(model: str, number: int) -> dict[str, Any]:
    drawn = {"temperature": 1.0, "top_p": 0.95} if number % 3 else {"temperature": 0.0}
    shown = {"logprobs": 0, "return_token_ids": True, "stream": True, "ignore_eos": True}
    prompt = f"{'Numbers are even or odd. ' * (number % 4)}Tell me about the number {number}."
    return {"model": model, "prompt": prompt, "seed": number, "max_tokens": TOKENS, **drawn, **shown}


async def drawn(http: httpx.AsyncClient, asked: dict[str, Any]) -> Drawn:
    """Tokens of a stream with their log-probabilities."""
    found: Drawn = []
    while True:
        async with http.stream("POST", "/completions", json=asked) as answer:
            if answer.status_code == 503:  # no worker is there at this moment
                await asyncio.sleep(0.2)
                continue
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        if ids := choice.get("token_ids"):
                            found += zip(ids, choice["logprobs"]["token_logprobs"], strict=True)
        return found


async def run(served: Ring, model: str, kills: int, seed: int) -> int:
    """The number of streams whose bits differ."""
    rng, wrong, done, going = random.Random(seed), 0, 0, True
    async with httpx.AsyncClient(base_url=served.openai_url, timeout=HANG_S) as http:
        alone = [await drawn(http, body(model, number)) for number in range(ASKED)]

        async def streams() -> None:
            nonlocal wrong, done
            while going:
                number = rng.randrange(ASKED)
                found = await drawn(http, body(model, number))
                at = next((i for i, (a, b) in enumerate(zip(found, alone[number], strict=True)) if a != b), None)
                if at is not None:
                    print(f"stream {number}: other bits from {at} on: {found[at]} for {alone[number][at]}", flush=True)
                wrong, done = wrong + (at is not None), done + 1

        tasks = [asyncio.create_task(streams()) for _ in range(AT_ONCE)]
        met = 0
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            workers = await asyncio.to_thread(served.workers)
            victim = rng.choice(workers)
            met += victim.rows
            os.kill(victim.pid, signal.SIGKILL)

            async def replaced(pid: int = victim.pid) -> bool:
                now = await asyncio.to_thread(served.workers)
                return len(now) == 2 and all(each.pid != pid for each in now)

            await wait_until(replaced)
        going = False
        await asyncio.gather(*tasks)
    print(f"{kills} kills of workers with {met} rows by their last reports; {done} streams of {TOKENS} tokens: {wrong} "
          "with other bits than alone")  # fmt: skip
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    args = parser.parse_args()
    flags = ("--workers", "2", "--batch-invariant", "--lease-ms", "1500")
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder), *flags, model=args.model) as served:
        return int(asyncio.run(run(served, args.model.name, args.kills, args.seed)) > 0)


if __name__ == "__main__":
    sys.exit(main())
