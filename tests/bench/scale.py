"""What one Redis, three shards or two rings carry of many workers and apis: `python -m tests.bench.scale [LEVEL ...]`.

The simulators of redis_scaling.py in slower time (slow_time.py), since few cores cannot simulate so many at full pace.
All figures are of the simulated second: what was measured in a second, times the factor. From the levels of plain Redis
the cost of each kind of work is fitted (least squares of relative errors). The shapes at the end are computed from
these costs: the share of Redis' main thread, and the tokens a second at which it would be full, all else in proportion.

`same-*` is one load on one Redis, on three shards and on two rings. `full-*` is more than they carry, for as many
servers as many workers, apis and streams, where each server gets the share of a core that it would have at full pace
(servers.py): what comes out is what they carry, whatever else the machine does, as long as the simulators keep up.
"""

import argparse
import os
import signal
import sys
from dataclasses import dataclass, replace

import numpy as np

from tests.bench.redis_scaling import Figures, Level, measure, show
from tests.bench.servers import HZ


def shape(workers: int, apis: int, rows: int, tokens_per_s: float, tokens: int, slow: int, fill: float = 1.0) -> Level:
    """All rows full, for so many tokens a second together; 0: nobody asks anything."""
    step_s = workers * rows * fill / tokens_per_s if tokens_per_s else 0.1
    return Level(workers, apis, rows, step_s, 128, tokens, fill if tokens_per_s else 0.0, slow)


SAME = replace(shape(48, 6, 32, 38_400, 128, 16), models=3)
FULL = replace(shape(48, 4, 32, 115_200, 128, 32), held=True)  # one server's


def times(level: Level, servers: int) -> Level:
    """As many workers, apis and streams for each server."""
    return replace(level, workers=servers * level.workers, apis=servers * level.apis)


LEVELS = {
    "idle-64": shape(64, 2, 8, 0, 0, 4),
    "idle-64-apis": shape(64, 50, 8, 0, 0, 8),
    "idle-256": shape(256, 2, 8, 0, 0, 8),
    "idle-1000": shape(1000, 2, 8, 0, 0, 16),
    "idle-1000-apis": shape(1000, 100, 8, 0, 0, 16),
    "streams-8": shape(8, 2, 32, 12_800, 128, 8),
    "streams-8-apis": shape(8, 32, 32, 12_800, 128, 8),
    "short-8": shape(8, 2, 32, 12_800, 16, 16),
    "streams-64": shape(64, 8, 8, 12_800, 128, 8),
    "streams-1000": shape(1000, 100, 8, 20_000, 128, 16, fill=0.1),
    "same-one": SAME,
    "same-shards": replace(SAME, shards=3),
    "same-rings": replace(SAME, rings=2),
    "full-one": replace(FULL, models=3),
    "full-shards": replace(times(FULL, 3), shards=3, models=3),
    "full-rings": replace(times(FULL, 2), rings=2, models=3),
}
WORK = ("worker", "api", "frame", "token", "sequence", "clock")


@dataclass(frozen=True)
class Row:
    """What a simulated second held, and what it cost."""

    main_s: float  # of Redis' main threads
    amounts: tuple[float, ...]  # of WORK


def row_of(seen: Figures) -> Row:
    """In simulated seconds."""
    level, slow = seen.level, seen.level.slow
    tokens, sequences = slow * seen.tokens / seen.took, slow * seen.sequences / seen.took
    frames = slow * seen.calls("publish", "spublish") if seen.tokens else 0.0
    clock = len(seen.servers) * slow * max(1, HZ // slow) / HZ  # in those of a server at full pace
    return Row(slow * seen.main, (level.workers, level.apis * level.rings, frames, tokens, sequences, clock))


def costs(rows: list[Row]) -> dict[str, float]:
    """Seconds of Redis' main thread for one of each kind of work."""
    scale = np.array([[1 / row.main_s] for row in rows])
    amounts = np.array([row.amounts for row in rows]) * scale
    found, *_ = np.linalg.lstsq(amounts, np.ones(len(rows)), rcond=None)
    return dict(zip(WORK, map(float, found), strict=True))


@dataclass(frozen=True)
class Ring:
    """A shape to compute: all rows full."""

    workers: int
    apis: int
    rows: int
    step_ms: float
    tokens: int  # of an answer

    def second(self) -> tuple[float, ...]:
        """What a second of it holds, by WORK. A step sends a frame to each api that reads any of its rows."""
        steps = self.workers * 1000 / self.step_ms
        read = self.apis * (1 - (1 - 1 / self.apis) ** self.rows)
        tokens = steps * self.rows
        return (self.workers, self.apis, steps * read, tokens, tokens / self.tokens, 1)


RINGS = (
    Ring(16, 2, 32, 20, 128),
    Ring(64, 2, 32, 40, 256),
    Ring(64, 16, 32, 40, 256),
    Ring(250, 16, 32, 100, 256),
    Ring(1000, 100, 32, 400, 256),
    Ring(1000, 100, 8, 100, 256),
)


def print_costs(found: dict[str, float], rows: dict[str, Row]) -> None:
    """The costs, how well they explain what was measured, and what they say of some rings."""
    for kind, cost in found.items():
        print(f"  {kind:9} {1e6 * cost:8.1f} us   {cost / found['token']:8.1f} tokens")
    for name, row in rows.items():
        said = sum(cost * amount for cost, amount in zip(found.values(), row.amounts, strict=True))
        print(f"  {name:16} said over measured {said / row.main_s:5.2f}")
    print(f"workers apis rows step ms    tok/s | thread  of it {', '.join(WORK[:-1])} | full at tok/s")
    for ring in RINGS:
        parts = [cost * amount for cost, amount in zip(found.values(), ring.second(), strict=True)]
        tokens = ring.second()[WORK.index("token")]
        shares = "  ".join(f"{part / sum(parts):5.0%}" for part in parts[:-1])
        print(
            f"{ring.workers:7d} {ring.apis:4d} {ring.rows:4d} {ring.step_ms:7.0f} {tokens:8,.0f} | {sum(parts):6.0%} "
            f" {shares} | {tokens / sum(parts):9,.0f}"
        )


HEADER = (
    "level            slow | busiest  together  commands  sent MB  connections | frames    tokens  sequences  kept  "
    "p50 ms  p99 ms | api us/token  simulators' cores  load | a worker's start: reads  commands"
)


def print_level(name: str, seen: Figures, row: Row) -> None:
    level = seen.level
    _, _, frames, tokens, sequences, _ = row.amounts
    sent = level.slow * sum(server.sent_bytes for server in seen.servers) / 1e6
    kept = tokens / level.offered if level.offered else 1.0
    api_us = 1e6 * seen.apis_s / seen.tokens if seen.tokens else 0.0
    reads = sum(seen.start.get(command, 0) for command in ("hgetall", "exists")) / level.workers
    calls = sum(seen.start.values()) / level.workers
    print(
        f"{name:16} {level.slow:4d} | {level.slow * seen.busiest:6.1%} {row.main_s:9.1%} "
        f"{level.slow * seen.calls():9,.0f} {sent:8.2f} {seen.clients:12d} | {frames:6,.0f} {tokens:9,.0f} "
        f"{sequences:10.1f} {kept:5.2f} {seen.delay_ms(0.5):7.1f} {seen.delay_ms(0.99):7.1f} | {api_us:12.1f} "
        f"{(seen.workers_s + seen.apis_s) / seen.took:18.2f} {os.getloadavg()[0]:5.1f} | {reads:23.1f} {calls:9.1f}",
        flush=True,
    )
    if len(seen.servers) > 1:
        each = "  ".join(f"{level.slow * server.main:.1%}" for server in seen.servers)
        print(f"      threads {each}", flush=True)


def main() -> int:
    """Measure, print, fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", nargs="*", help=f"of {', '.join(LEVELS)}; default: all")
    parser.add_argument("--seconds", type=float, default=15, help="at the least; never less than two periods")
    parser.add_argument("--processes", type=int, default=4, help="of workers, and as many of apis")
    parser.add_argument("--commands", action="store_true", help="also what Redis was asked, and how long that took")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with all that it has started
    print(HEADER)
    rows: dict[str, Row] = {}
    for name in chosen.level or LEVELS:
        level = LEVELS[name]
        seen = measure(level, max(chosen.seconds, 2.0 * level.slow), chosen.processes, chosen.commands)
        row = row_of(seen)
        if level.shards == 1 and not level.held:
            rows[name] = row
        print_level(name, seen, row)
        if chosen.commands:
            show(seen)
    if len(rows) > len(WORK):
        print_costs(costs(list(rows.values())), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
