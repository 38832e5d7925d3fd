"""Placement over an oracle, simulated: `python -m tests.bench.placement [SCENARIO ...] [--minutes 30] [--seeds 2]`.

Eight machines of three sizes serve twenty models that need 1.4 times their memory, with the real decision code
(worker/host/placement.py) on every host. A sequence is served in time when it is interactive and a worker took it
within 30 s, or batch and done by its deadline (without one: by the end); it counts with its tokens.

Two oracles. `all` is everything that was asked for: no placement can serve more. `ahead` runs the same rules with
knowledge of the future: it evicts what is needed last, and loads what will be needed within 12 s. The optimum lies
between them, or below `ahead` where that is worse than the rules without it. `roomy` is a ring whose machines hold
every model that alone fits them, without loads: what is missing there is missing for lack of speed, not of memory.
`--ablate` leaves out one rule after another. `--outside N` gives each of the N models that are asked for most a worker
of no host, on a further small machine, and shows what hosts load that see its rows, and hosts that do not. `--trace`
takes arrivals and lengths from files of the form of Azure's LLM inference traces (github.com/Azure/AzurePublicDataset,
CC-BY; Patel et al., Splitwise, ISCA 2024); none of them is here.
"""

import argparse
import csv
import json
import lzma
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import msgspec

from shared.catalogue import HeldModel, ModelDemand, RingModels
from tests.bench.agent_turns import RECORDED
from tests.bench.placement_ring import GB, Decide, Machine, Model, Request, Ring, Tally
from worker.host.placement import Load, PlacementRules, Unload, decide

AIM = 0.9  # of what was asked for
SLO_MS = 30_000  # from a request to its row
LOOK_AHEAD_MS = 12_000
MACHINES = [
    *(Machine(f"small-{n}", 6 * GB, 100e9, 2.5e9) for n in range(3)),
    *(Machine(f"middle-{n}", 14 * GB, 270e9, 4e9) for n in range(3)),
    *(Machine(f"large-{n}", 40 * GB, 540e9, 6e9) for n in range(2)),
]
SIZES = [0.4, 0.7, 1, 1.5, 2.2, 2.5, 3, 4.2, 4.6, 5, 5.5, 8, 8.5, 9, 13, 16, 18, 20, 30, 38]  # GB, with KV
MODELS = [Model(f"model-{n:02d}", round(size * GB)) for n, size in enumerate(SIZES)]


class Demand:
    """Requests of some minutes, drawn from a seed."""

    def __init__(self, seed: int, minutes: float) -> None:
        self.random = random.Random(seed)
        self.end_ms = minutes * 60_000
        self.requests: list[Request] = []
        order = list(MODELS)
        self.random.shuffle(order)
        self.popular = order  # the first is asked for most
        self.zipf = [1 / (rank + 1) for rank in range(len(order))]
        self._sessions = 0

    def model(self) -> str:
        return self.random.choices(self.popular, self.zipf)[0].name

    def _tokens(self, mean: float) -> float:
        return min(4000.0, self.random.lognormvariate(math.log(mean) - 0.32, 0.8))

    def chats(self, per_s: float, busy: Callable[[float, int], float] = lambda ms, rank: 1.0) -> None:
        """Single requests: Poisson, models by Zipf; `busy` thins them by time and rank, 0 to 1."""
        ranks = {model.name: rank for rank, model in enumerate(self.popular)}
        at = 0.0
        while (at := at + self.random.expovariate(per_s) * 1000) < self.end_ms:
            model = self.model()
            if self.random.random() < busy(at, ranks[model]):
                self.requests.append(Request(at, model, "interactive", self._tokens(200), prompt=500))

    def day(self, per_s: float) -> None:
        """Chats of a day in the given time: each model has its own busy hours."""
        self.chats(per_s, lambda ms, rank: 0.5 + 0.5 * math.sin(2 * math.pi * (ms / self.end_ms + rank / 7)))

    def bursts(self, per_minute: float) -> None:
        """Some dozens of requests for one model within seconds, of any popularity."""
        at = 0.0
        while (at := at + self.random.expovariate(per_minute) * 60_000) < self.end_ms:
            model = self.random.choice(self.popular).name
            for _ in range(self.random.randint(10, 50)):
                when = at + self.random.uniform(0, 15_000)
                self.requests.append(Request(when, model, "interactive", self._tokens(150), prompt=300))

    def agents(self, count: int) -> None:
        """Sessions of agents that each ask one model again and again, with pauses while a tool runs."""
        for _ in range(count):
            self._sessions += 1
            at, prompt, model = self.random.uniform(0, self.end_ms), 6_000.0, self.model()
            for _ in range(self.random.randint(8, 40)):
                tokens = self._tokens(180)
                self.requests.append(Request(at, model, "interactive", tokens, prompt, session=self._sessions))
                prompt = min(40_000, prompt + tokens + 800)
                at += tokens * 30 + self.random.lognormvariate(math.log(12_000), 1.0)
                if at > self.end_ms:
                    break

    def recorded(self, count: int) -> None:
        """Sessions whose prompts have the lengths of those that Claude Code, Codex and opencode have sent."""
        for _ in range(count):
            self._sessions += 1
            at, model = self.random.uniform(0, self.end_ms), self.model()
            for prompt in self.random.choice(recorded_prompts()):
                tokens = self._tokens(180)
                self.requests.append(Request(at, model, "interactive", tokens, prompt, session=self._sessions))
                at += tokens * 30 + self.random.lognormvariate(math.log(12_000), 1.0)

    def jobs(self, count: int, sequences: int) -> None:
        """Batch jobs of one model; half of them have a deadline, and models are as likely as each other."""
        for number in range(count):
            at, model = self.random.uniform(0, 0.6 * self.end_ms), self.random.choice(self.popular).name
            deadline = at + self.random.uniform(0.2, 0.4) * self.end_ms if number % 2 else math.inf
            for _ in range(self.random.randint(sequences // 2, sequences * 3 // 2)):
                self.requests.append(Request(at, model, "batch", self._tokens(250), 300, deadline))

    def trace(self, files: Sequence[Path], every: int) -> None:
        """Every so many-th request of recorded traces, at its time and with its lengths; models by Zipf, in each file
        by another order, since traces name none."""
        for number, file in enumerate(files):
            order = [*self.popular[7 * number :], *self.popular[: 7 * number]]
            with file.open(newline="") as lines:
                rows = list(csv.DictReader(lines))[::every]
            first = min(map(_trace_ms, rows))
            for row in rows:
                (model,) = self.random.choices(order, self.zipf)
                at, prompt = _trace_ms(row) - first, float(row["ContextTokens"])
                self.requests.append(
                    Request(at, model.name, "interactive", max(1.0, float(row["GeneratedTokens"])), prompt)
                )

    def hurry(self) -> None:
        """Give interactive requests deadlines of 5 to 60 s."""
        for request in self.requests:
            if request.kind == "interactive":
                request.deadline_ms = request.at_ms + self.random.uniform(5_000, 60_000)

    def done(self) -> list[Request]:
        return sorted((each for each in self.requests if each.at_ms < self.end_ms), key=lambda each: each.at_ms)


def _trace_ms(row: Mapping[str, str]) -> float:
    return datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() * 1000


def recorded_prompts() -> list[list[float]]:
    """Prompt tokens of the turns of each recorded session, at four bytes of JSON a token."""
    agents = json.loads(lzma.decompress(RECORDED.read_bytes()))
    return [[len(json.dumps(body)) / 4 for _, body in session] for sessions in agents.values() for session in sessions]


def mixed(demand: Demand) -> None:
    """All kinds at once."""
    demand.day(0.5)
    demand.bursts(0.3)
    demand.agents(round(demand.end_ms / 60_000))
    demand.jobs(6, 150)


def hurried(demand: Demand) -> None:
    """Bursts and chats of which each has to begin by its own deadline, and jobs."""
    demand.chats(0.4)
    demand.bursts(0.5)
    demand.jobs(8, 100)
    demand.hurry()


SCENARIOS: dict[str, Callable[[Demand], None]] = {
    "zipf": lambda demand: demand.chats(0.8),
    "day": lambda demand: demand.day(1.6),
    "bursts": lambda demand: demand.bursts(1.0),
    "agents": lambda demand: demand.agents(round(2.5 * demand.end_ms / 60_000)),
    "recorded": lambda demand: demand.recorded(round(6 * demand.end_ms / 60_000)),
    "jobs": lambda demand: demand.jobs(16, 150),
    "mixed": mixed,
    "deadlines": hurried,
}
ABLATIONS = {
    "all rules": PlacementRules(),
    "no hold": PlacementRules(hold=0),
    "no copies": PlacementRules(most_copies=1),
    "no turn": PlacementRules(batch_turn_s=1e9),
    "no patience": PlacementRules(patience_s=math.inf),
}


@dataclass(frozen=True)
class Outcome:
    """Figures of one run."""

    offered: float  # tokens
    served: float  # of these, in time
    waits_ms: list[float]  # of interactive sequences, to their row
    tally: Tally


def in_time(request: Request, end_ms: float) -> bool:
    """True for a sequence that counts as served."""
    if request.kind == "interactive":
        return request.began_ms <= min(request.at_ms + SLO_MS, request.deadline_ms)
    return request.ended_ms <= min(request.deadline_ms, end_ms)


def simulate(
    requests: Sequence[Request],
    end_ms: float,
    decided: Decide,
    rules: PlacementRules,
    *,
    roomy: bool = False,
    seed: int = 0,
    outside: Sequence[str] = (),
) -> Outcome:
    """One run; sequences of its last SLO_MS do not count. `outside`: models with a worker of no host."""
    requests = [replace(each) for each in requests]
    workers = {name: replace(MACHINES[0], id=f"outside-{name}") for name in outside}
    ring = Ring(MACHINES, MODELS, decided, rules, seed=seed, outside=workers)
    if roomy:
        ring.hold_everything()
    ring.run(requests, end_ms)
    counted = [each for each in requests if each.at_ms < end_ms - SLO_MS]
    waits = [min(each.began_ms, end_ms) - each.at_ms for each in counted if each.kind == "interactive"]
    return Outcome(
        sum(each.tokens for each in counted),
        sum(each.tokens for each in counted if in_time(each, end_ms)),
        waits,
        ring.tally,
    )


def foresight(requests: Sequence[Request]) -> Decide:
    """The same rules with facts from the future: an idle model was last used as long ago as it will be used ahead, and
    what is needed within LOOK_AHEAD_MS counts as waited for."""
    arrivals: dict[str, list[float]] = {model.name: [] for model in MODELS}
    for request in requests:
        arrivals[request.model].append(request.at_ms)
    passed = dict.fromkeys(arrivals, 0)

    def ahead(model: str, now_ms: float) -> float:
        times = arrivals[model]
        while passed[model] < len(times) and times[passed[model]] < now_ms:
            passed[model] += 1
        return times[passed[model]] - now_ms if passed[model] < len(times) else 1e9

    def seen(held: HeldModel, asked: ModelDemand, now_ms: int) -> HeldModel:
        if held.state != "ready" or asked.waiting or asked.running:
            return held
        used = round(now_ms - ahead(held.name, now_ms))
        return msgspec.structs.replace(held, used_ms=used, since_ms=min(held.since_ms, used))

    def decided(
        facts: RingModels, demand: Mapping[str, ModelDemand], me: str, rules: PlacementRules
    ) -> list[Load | Unload]:
        now = facts.now_ms
        hosts = tuple(
            msgspec.structs.replace(host, held=tuple(seen(held, demand[held.name], now) for held in host.held))
            for host in facts.hosts
        )
        soon = {
            name: msgspec.structs.replace(asked, waiting={"interactive": 1}, oldest_ms={"interactive": 0})
            if not asked.waiting and ahead(name, now) < LOOK_AHEAD_MS
            else asked
            for name, asked in demand.items()
        }
        return decide(msgspec.structs.replace(facts, hosts=hosts), soon, me, rules)

    return decided


def blind(names: Collection[str]) -> Decide:
    """The same rules without the knowledge that rows of some models run elsewhere."""

    def decided(
        facts: RingModels, demand: Mapping[str, ModelDemand], me: str, rules: PlacementRules
    ) -> list[Load | Unload]:
        unseen = {name for name in names if not facts.holding(name)}
        seen = {
            name: msgspec.structs.replace(asked, running={}) if name in unseen else asked
            for name, asked in demand.items()
        }
        return decide(facts, seen, me, rules)

    return decided


def most_asked(requests: Sequence[Request], count: int) -> list[str]:
    """The models of most requests."""
    return [name for name, _ in Counter(request.model for request in requests).most_common(count)]


def quantile(values: Sequence[float], part: float) -> float:
    """A quantile of times, in seconds."""
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] / 1000


def shown(outcomes: Sequence[Outcome]) -> str:
    """A line's figures of our own rules, over the seeds."""
    waits = [wait for outcome in outcomes for wait in outcome.waits_ms]
    tallies = [outcome.tally for outcome in outcomes]
    turns = [wait for tally in tallies for wait, _ in tally.turn_waits_ms]
    loads, thrash = sum(tally.loads for tally in tallies), sum(tally.thrash for tally in tallies)
    busy, faults = sum(tally.evicted_busy for tally in tallies), sum(tally.faults for tally in tallies)
    mean_s = sum(waits) / 1000 / max(1, len(waits))
    return (
        f"{share(outcomes):5.3f} | {loads:5d} {thrash:6d} {busy:5d} | {mean_s:6.1f} {quantile(waits, 0.95):5.0f} "
        f"{quantile(waits, 0.99):5.0f} | {max(turns, default=0) / 1000:6.0f} | {faults}"
    )


def share(outcomes: Sequence[Outcome]) -> float:
    """Tokens served in time over tokens asked for."""
    return sum(outcome.served for outcome in outcomes) / max(1.0, sum(outcome.offered for outcome in outcomes))


def drawn(scenario: str, seed: int, minutes: float) -> tuple[list[Request], float]:
    """The requests of a scenario by time, and its end."""
    demand = Demand(seed, minutes)
    SCENARIOS[scenario](demand)
    return demand.done(), demand.end_ms


HEADER = "| loads thrash  busy | mean s   p95   p99 | turn s | faults"


def main(argv: list[str] | None = None) -> int:
    """Print a line for each scenario; 1 when ours is below AIM in one whose speed suffices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="*", default=list(SCENARIOS), help=", ".join(SCENARIOS))
    parser.add_argument("--minutes", type=float, default=30, help="of simulated time")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--ablate", action="store_true", help="leave out one rule after another")
    parser.add_argument("--outside", type=int, default=0, help="models that have a worker of no host")
    parser.add_argument("--trace", type=Path, nargs="+", help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--every", type=int, default=6, help="take one of so many requests of a trace")
    args = parser.parse_args(argv)
    if args.trace:
        SCENARIOS["trace"], args.scenario = lambda demand: demand.trace(args.trace, args.every), ["trace"]
    failed = False
    own_rules = "scenario rules | ours  " if args.ablate or args.outside else "scenario    tok/s | roomy ahead | ours  "
    print(own_rules + HEADER)
    for name in args.scenario:
        runs = [drawn(name, seed, args.minutes) for seed in range(args.seeds)]

        def outcomes(
            decider: Callable[[list[Request]], Decide], rules: PlacementRules, roomy: bool = False
        ) -> list[Outcome]:
            return [
                simulate(requests, end, decider(requests), rules, roomy=roomy, seed=seed)
                for seed, (requests, end) in enumerate(runs)  # noqa: B023
            ]

        if args.outside:
            for label, sees in (("see its rows", True), ("do not", False)):
                found = [
                    simulate(requests, end, decide if sees else blind(own), PlacementRules(), seed=seed, outside=own)
                    for seed, (requests, end) in enumerate(runs)
                    if (own := most_asked(requests, args.outside))
                ]
                print(f"{name:9} {label:12} | {shown(found)}", flush=True)
            continue
        if args.ablate:
            for label, rules in ABLATIONS.items():
                print(f"{name:9} {label:12} | {shown(outcomes(lambda _: decide, rules))}", flush=True)
            continue
        ours = outcomes(lambda _: decide, PlacementRules())
        roomy = share(outcomes(lambda _: lambda *_: [], PlacementRules(), roomy=True))
        ahead = share(outcomes(foresight, PlacementRules()))
        speed = sum(each.offered for each in ours) / sum(end for _, end in runs) * 1000
        print(f"{name:9} {speed:7.0f} | {roomy:5.3f} {ahead:5.3f} | {shown(ours)}", flush=True)
        failed |= share(ours) < AIM * min(1.0, roomy)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
