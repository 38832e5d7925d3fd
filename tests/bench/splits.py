"""Regret of splits: `python -m tests.bench.splits [--seeds 40] [--ring] [--requests 600]`.

Regret is the reward that requests would have brought beyond what they did, had all gone to the better version: the sum
of the differences of the versions' mean rewards. Simulated with the product's own shares and verdict, over 1,000
requests whose rewards come at once or 50 requests later; then, with `--ring`, over HTTP: a ring with models/tiny, an
adapter that `mlx_parallm_train` has taught sixteen sums, and every answer judged through /v1/feedback by whether its
sum is right.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from shared.splits import RewardSums, Split, shares, winner
from tests.e2e.rings import Process, Ring, ring
from trainer.rollouts.environments import ArithmeticEnvironment

REQUESTS = 1_000
LATEST, CANDIDATE = 1, 2
CAREFUL, EVEN = (0.9, 0.1), (0.5, 0.5)
WAYS = {
    "fixed 0.9/0.1": (CAREFUL, False),
    "fixed 0.5/0.5": (EVEN, False),
    "auto from 0.9/0.1": (CAREFUL, True),
    "auto from 0.5/0.5": (EVEN, True),
}
CASES = [(0.8, 0.3), (0.3, 0.8), (0.7, 0.5), (0.5, 0.7), (0.55, 0.45), (0.45, 0.55), (0.6, 0.6)]  # latest, candidate
AT_ONCE = 8  # requests of the real run
TASKS = 16


class Run(NamedTuple):
    """What came of a split."""

    regret: float
    low_after: int | None  # requests until the worse version's share was below 0.02
    winner: int


class Earned:
    """Counts as Redis has them."""

    def __init__(self) -> None:
        self.of = {LATEST: RewardSums(), CANDIDATE: RewardSums()}

    def add(self, version: int, reward: float) -> None:
        """One reward."""
        before = self.of[version]
        count, apart = before.count + 1, reward - before.mean
        mean = before.mean + apart / count
        self.of[version] = RewardSums(count, mean, before.squares + apart * (reward - mean))

    @property
    def count(self) -> int:
        """Of all versions."""
        return sum(each.count for each in self.of.values())


def simulated(chances: tuple[float, float], split: Split, *, delay: int, seed: int, verdict: bool) -> Run:
    """One split over versions that are right so often."""
    draw, earned, coming = random.Random(seed), Earned(), deque[tuple[int, int, float]]()
    chance = dict(zip(split.versions, chances, strict=True))
    best, decided = max(chances), 0
    worse = min(split.versions, key=lambda version: chance[version])
    regret, low_after, parts = 0.0, None, shares(split, earned.of)
    for at in range(REQUESTS):
        moved = False
        while coming and coming[0][0] <= at and not decided:
            _, version, reward = coming.popleft()
            earned.add(version, reward)
            moved = True
            if verdict and earned.count >= split.verdict_after:
                decided, _ = winner(split, earned.of)
        parts = shares(split, earned.of) if moved else parts
        if low_after is None and parts[split.versions.index(worse)] < 0.02:
            low_after = at
        version = decided or (LATEST if draw.random() < parts[0] else CANDIDATE)
        regret += best - chance[version]
        coming.append((at + 1 + delay, version, float(draw.random() < chance[version])))
    return Run(regret, low_after, decided)


def simulate(seeds: int) -> None:
    """Print a table."""
    print(f"mean regret (worst seed) over {REQUESTS} requests, {seeds} seeds; right: latest / candidate")
    for delay in (0, 50):
        print(f"rewards {'at once' if not delay else f'{delay} requests later'}")
        for chances in CASES:
            cells = []
            for way, (weights, auto) in WAYS.items():
                split = Split((LATEST, CANDIDATE), weights, LATEST, auto=auto)
                runs = [simulated(chances, split, delay=delay, seed=seed, verdict=auto) for seed in range(seeds)]
                regrets = [run.regret for run in runs]
                cells.append(f"{way}: {statistics.mean(regrets):.1f} ({max(regrets):.0f})")
            low = sum(run.low_after is not None and run.low_after < 200 for run in runs)
            better = CANDIDATE if chances[1] > chances[0] else LATEST
            right = sum(run.winner == better for run in runs)
            cells.append(f"below 0.02 within 200: {low}/{seeds}, verdict right: {right}/{seeds}")
            print(f"  {chances[0]} / {chances[1]}  " + "; ".join(cells), flush=True)


class Asker:
    """Who asks sums of the adapter, and judges each answer."""

    def __init__(self, http: httpx.AsyncClient, requests: int) -> None:
        self._http, self._requests = http, requests
        self._sums = ArithmeticEnvironment(0, "train", TASKS)

    async def ask(self, model: str, at: int) -> tuple[int, float]:
        """The version that has answered, and 1 when the sum is right, else 0."""
        task = await self._sums.reset(at)
        body = {"model": model, "messages": task.prompt, "max_tokens": 5, "temperature": 1.0}
        answer = (await self._http.post("/v1/chat/completions", json=body)).raise_for_status().json()
        outcome = await self._sums.step(task, answer["choices"][0]["message"]["content"] or "")
        said = {"id": answer["id"], "reward": outcome.reward}
        (await self._http.post("/v1/feedback", json=said)).raise_for_status()
        return int(answer["system_fingerprint"].rpartition("@")[2]), outcome.reward

    async def mean(self, model: str) -> float:
        """What a version earns."""
        earned = [await self._batch(model, at) for at in range(0, 20 * TASKS, AT_ONCE)]
        return statistics.mean(reward for batch in earned for _, reward in batch)

    async def _batch(self, model: str, at: int) -> list[tuple[int, float]]:
        return await asyncio.gather(*(self.ask(model, at + i) for i in range(AT_ONCE)))

    async def split(self, terms: dict[str, Any], means: dict[int, float]) -> str:
        """What a split of the adapter comes to."""
        path = "/v1/adapters/policy/split"
        (await self._http.put(path, json=terms)).raise_for_status()
        best, worse = max(means.values()), min(means, key=lambda version: means[version])
        regret, requests, low_after, began = 0.0, dict.fromkeys(means, 0), None, time.monotonic()
        for at in range(0, self._requests, AT_ONCE):
            for version, _ in await self._batch("policy", at):
                regret += best - means[version]
                requests[version] += 1
            state = (await self._http.get(path)).json()
            share = {each["id"]: each["share"] for each in state["versions"]}[f"policy@{worse}"]
            if low_after is None and share < 0.02:
                low_after = at + AT_ONCE
        took = time.monotonic() - began
        state = await self._settled(path, state["verdict_after"] <= self._requests)
        verdict = state["verdict"] and f"{state['verdict']['winner']} {state['verdict']['outcome']}"
        await self._http.delete(path)
        return (
            f"regret {regret:.1f} over {self._requests} requests ({took:.0f} s), to each version {requests}, "
            f"worse one's share below 0.02 after {low_after}, rewards counted {state['rewards']}, verdict {verdict}"
        )

    async def _settled(self, path: str, due: bool) -> dict[str, Any]:
        """The split once its verdict is there, or all of its rewards."""
        deadline = time.monotonic() + 30
        while True:
            state: dict[str, Any] = (await self._http.get(path)).json()
            done = state["verdict"] is not None if due else state["rewards"] >= self._requests
            if done or time.monotonic() > deadline:
                return state
            await asyncio.sleep(0.2)


async def real(served: Ring, requests: int) -> None:
    """Print what splits of a taught adapter come to, over HTTP."""
    async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as http:
        asker = Asker(http, requests)
        taught = (await http.get("/v1/adapters/policy")).json()["latest"]
        means = {version: await asker.mean(f"policy@{version}") for version in (1, taught)}
        print("right answers: " + ", ".join(f"policy@{version} {mean:.3f}" for version, mean in means.items()))
        for latest, other, what in ((taught, 1, "a bad candidate"), (1, taught, "a good candidate")):
            for way, (weights, auto) in WAYS.items():
                await http.post("/model/switch-lora", json={"version": latest})
                split = f"policy@{latest}:{weights[0]},policy@{other}:{weights[1]}"
                terms = {"split": split, "auto": auto, "verdict_after": 400 if auto else 20_000}
                print(f"{what}, {way}: {await asker.split(terms, means)}", flush=True)


def main() -> None:
    """Simulate; on demand, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--ring", action="store_true", help="over HTTP, too")
    parser.add_argument("--requests", type=int, default=600, help="of each split over HTTP")
    parser.add_argument("--steps", type=int, default=20, help="train steps of the good version")
    asked = parser.parse_args()
    simulate(asked.seeds)
    if not asked.ring:
        return
    keeping = ("--feedback-ttl-days", "1", "--adapter-keep-n", "0")
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder) / "ring", *keeping) as served:
        recipe = ["--config", "trainer/recipes/tiny-fixed.yaml", "--steps", str(asked.steps)]
        where = ["--connect-to", served.url, "--run-dir", f"{folder}/run"]
        trainer = Process.start("trainer", *recipe, *where, "--adapter-keep-n", "0")
        assert trainer.wait(600) == 0, trainer.output
        asyncio.run(real(served, asked.requests))


if __name__ == "__main__":
    sys.exit(main())
