"""A leaving worker's long row: `python -m tests.bench.transfers [--tokens 8000] [--rounds 3]`.

A ring of real processes. A stream with a long prompt runs on one worker, which is told to leave at once; a second one
goes on with it. The figure is the time that the client waits for its next token meanwhile: from the last one before the
SIGTERM, with and without `--kv-transfer`. Random weights, so large that reading the prompt is what takes time.
"""

import argparse
import json
import math
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tests.bench.models import QWEN3_SMALL, random_qwen3
from tests.e2e.rings import Process, Ring, ring
from tests.waiting import HANG_S

AIM = 0.3
LEAVES_AT = 40  # tokens
OUTPUT_TOKENS = 900  # so many that the row is not at its end by then


@contextmanager
def worker(served: Ring, model: Path, folder: Path, name: str, transfer: bool) -> Iterator[Process]:
    """A worker of the ring's model that leaves at once when it is told to."""
    process = Process.start(
        "worker", "--redis", served.redis_url, "--model", str(model), "--worker-id", name, "--drain-grace-s", "0",
        "--adapter-cache-dir", str(folder / name), "--kv-transfer" if transfer else "--no-kv-transfer",
    )  # fmt: skip
    try:
        yield process
    finally:
        process.stop()


def moved(served: Ring, model: Path, folder: Path, tokens: int, name: str, *, transfer: bool) -> float:
    """Seconds between two tokens of a row that moves from one worker to another in between.

    Measured again where the row was at its end before the other worker had it: a busy machine reads a stream late.
    """
    number = 0
    while (longest := _moved(served, model, folder, tokens, f"{name}-{number}", transfer=transfer)) is None:
        number += 1
    return longest


def _moved(served: Ring, model: Path, folder: Path, tokens: int, name: str, *, transfer: bool) -> float | None:
    prompt = [random.randrange(3, 4000) for _ in range(tokens)]
    body = {
        "model": model.name,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "seed": 1,
    }
    with (
        worker(served, model, folder, f"leaver-{name}", transfer) as leaver,
        worker(served, model, folder, f"heir-{name}", transfer) as heir,
        httpx.Client(base_url=served.url, timeout=300) as http,
    ):
        for process in (leaver, heir):
            process.wait_for_line("worker.ready")
        heir.popen.send_signal(signal.SIGSTOP)  # it shall not be the one that gets the row first
        try:
            longest = _longest_wait(http, body, leaver, heir)
        finally:
            heir.popen.send_signal(signal.SIGCONT)
        if not heir.printed("worker.took_over"):
            return None
        fetched = bool(heir.printed("kv.fetched"))
        assert transfer or not fetched, heir.output
        if transfer and not fetched:
            print("The KV was computed, not fetched: the heir reckoned that computing it is quicker.")
    return longest


def _longest_wait(http: httpx.Client, body: dict[str, Any], leaver: Process, heir: Process) -> float:
    """Between two tokens, from when the one is told to leave and the other may go on."""
    last = longest = 0.0
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code == 503:  # the api does not know yet that a worker has come
                time.sleep(0.2)
                continue
            assert reply.status_code == 200, reply.read()
            for at, line in enumerate(line for line in reply.iter_lines() if line.startswith("data: {")):
                assert "error" not in json.loads(line[6:]), line
                now = time.perf_counter()
                if at == LEAVES_AT:
                    heir.popen.send_signal(signal.SIGCONT)
                    leaver.popen.send_signal(signal.SIGTERM)
                elif at > LEAVES_AT:
                    longest = max(longest, now - last)
                    if at > _taken_over_at(heir):
                        break
                last = now
        return longest
    raise AssertionError("no worker came")


def _taken_over_at(heir: Process) -> float:
    """How many tokens the heir found written when it took the row over: its own come after those."""
    lines = heir.printed("worker.took_over")
    return json.loads(lines[0])["events"] if lines else math.inf


def main() -> None:
    """Measure both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shape = {**QWEN3_SMALL, "max_position_embeddings": args.tokens + 1024}
        model = random_qwen3(folder / "model", shape)
        with ring(folder / "ring", "--workers", "0") as served:
            pairs = [
                tuple(moved(served, model, folder, args.tokens, f"{at}-{on}", transfer=on) for on in (True, False))
                for at in range(args.rounds)
            ]
    fetched, computed = (median(each) for each in zip(*pairs, strict=True))
    print(f"a row of {args.tokens} tokens moves; its next token after: {fetched:.2f} s with transfer, {computed:.2f} s")
    print(f"ratio {median(one / other for one, other in pairs):.3f}   aim: at most {AIM}")


if __name__ == "__main__":
    main()
