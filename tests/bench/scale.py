"""What one Redis carries of many workers and apis: `python -m tests.bench.scale [LEVEL ...]`.

The simulators of redis_scaling.py in slower time (slow_time.py), since few cores cannot simulate so many at full pace.
All figures are of the simulated second: what was measured in a second, times the factor. From all levels together the
cost of each kind of work is fitted (least squares of relative errors); what Redis does by its own clock, which the
factor multiplies, is one of them. The shapes at the end are computed from these costs: the share of Redis' main thread,
and the tokens a second at which it would be full, all else in proportion.
"""

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from tests.bench.redis_scaling import Figures, Level, measure, show


def shape(workers: int, apis: int, rows: int, tokens_per_s: float, tokens: int, slow: int, fill: float = 1.0) -> Level:
    """All rows full, for so many tokens a second together; 0: nobody asks anything."""
    step_s = workers * rows * fill / tokens_per_s if tokens_per_s else 0.1
    return Level(workers, apis, rows, step_s, 128, tokens, fill if tokens_per_s else 0.0, slow)


LEVELS = {
    "idle-64": shape(64, 2, 8, 0, 0, 4),
    "idle-64-slower": shape(64, 2, 8, 0, 0, 16),
    "idle-250": shape(250, 2, 8, 0, 0, 8),
    "idle-256-slower": shape(256, 2, 8, 0, 0, 16),
    "idle-1000": shape(1000, 2, 8, 0, 0, 16),
    "idle-1000-apis": shape(1000, 100, 8, 0, 0, 16),
    "streams-8": shape(8, 2, 32, 12_800, 128, 8),
    "streams-8-apis": shape(8, 32, 32, 12_800, 128, 8),
    "short-8": shape(8, 2, 32, 12_800, 16, 16),
    "streams-64": shape(64, 8, 8, 12_800, 128, 8),
    "streams-1000": shape(1000, 100, 8, 16_000, 128, 16, fill=0.1),
}
WORK = ("worker", "frame", "token", "sequence", "clock")


@dataclass(frozen=True)
class Row:
    """What a simulated second held, and what it cost."""

    main_s: float  # of Redis' main thread
    amounts: tuple[float, ...]  # of WORK


def row_of(seen: Figures) -> Row:
    """In simulated seconds."""
    slow = seen.level.slow
    tokens, sequences = slow * seen.tokens / seen.took, slow * seen.sequences / seen.took
    frames = slow * seen.calls("publish") if seen.tokens else 0.0
    return Row(slow * seen.main, (seen.level.workers, frames, tokens, sequences, slow))


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
        return (self.workers, steps * read, tokens, tokens / self.tokens, 1)


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
    print("workers apis rows step ms    tok/s | thread  of it workers, frames, tokens, sequences | full at tok/s")
    for ring in RINGS:
        parts = [cost * amount for cost, amount in zip(found.values(), ring.second(), strict=True)]
        tokens = ring.second()[WORK.index("token")]
        shares = "  ".join(f"{part / sum(parts):5.0%}" for part in parts[:-1])
        print(
            f"{ring.workers:7d} {ring.apis:4d} {ring.rows:4d} {ring.step_ms:7.0f} {tokens:8,.0f} | {sum(parts):6.0%} "
            f" {shares} | {tokens / sum(parts):9,.0f}"
        )


def main() -> int:
    """Measure, print, fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", nargs="*", help=f"of {', '.join(LEVELS)}; default: all")
    parser.add_argument("--seconds", type=float, default=15, help="at the least; never less than two periods")
    parser.add_argument(
        "--processes", type=int, default=4, help="of workers, and as many of apis; of 400 workers at most each"
    )
    parser.add_argument("--commands", action="store_true")
    chosen = parser.parse_args()
    print(
        "level            slow | thread  commands  sent MB  connections | frames   tokens  sequences  kept | simulators"
    )
    rows: dict[str, Row] = {}
    for name in chosen.level or LEVELS:
        level = LEVELS[name]
        seen = measure(level, max(chosen.seconds, 2.0 * level.slow), chosen.processes, chosen.commands)
        row = rows[name] = row_of(seen)
        _, frames, tokens, sequences, slow = row.amounts
        sent = slow * (seen.after.sent_bytes - seen.before.sent_bytes) / seen.took / 1e6
        kept = tokens / level.offered if level.offered else 1.0
        print(
            f"{name:16} {slow:4.0f} | {row.main_s:6.1%} {slow * seen.calls():9,.0f} {sent:8.2f} "
            f"{seen.after.clients:12d} | {frames:6,.0f} {tokens:8,.0f} {sequences:10.1f} {kept:5.2f} "
            f"| {seen.simulators_s / seen.took:.2f} cores",
            flush=True,
        )
        if chosen.commands:
            show(seen)
    if len(rows) > len(WORK):
        print_costs(costs(list(rows.values())), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
