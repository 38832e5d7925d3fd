"""What one Redis would carry of a thousand workers and a hundred apis: `python -m tests.bench.scale [LEVEL ...]`.

The simulators of redis_scaling.py in slower time (slow_time.py), since few cores cannot simulate so many at full pace.
All figures are of the simulated second: what was measured in a second, times the factor. Then what each kind of work costs
Redis' main thread is fitted (least squares of all levels), and from that the knee is computed for some shapes.
"""

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from tests.bench.redis_scaling import Figures, Level, measure


def shape(workers: int, apis: int, rows: int, tokens_per_s: float, tokens: int, slow: int, fill: float = 1.0) -> Level:
    """All rows full, for so many tokens a second together; 0: nobody asks anything."""
    step_s = workers * rows * min(1.0, fill) / tokens_per_s if tokens_per_s else 0.1
    return Level(workers, apis, rows, step_s, 128, tokens, fill if tokens_per_s else 0.0, slow)


LEVELS = {
    "idle-64": shape(64, 2, 8, 0, 0, 4),
    "idle-64-slower": shape(64, 2, 8, 0, 0, 16),
    "idle-250": shape(250, 2, 8, 0, 0, 8),
    "idle-1000": shape(1000, 2, 8, 0, 0, 16),
    "idle-1000-apis": shape(1000, 100, 8, 0, 0, 16),
    "streams-8": shape(8, 2, 32, 12_800, 128, 8),
    "streams-8-apis": shape(8, 32, 32, 12_800, 128, 8),
    "short-8": shape(8, 2, 32, 12_800, 16, 16),
    "streams-64": shape(64, 8, 8, 12_800, 128, 8),
    "streams-1000": shape(1000, 100, 8, 16_000, 128, 16, fill=0.1),
}
FEATURES = ("worker", "api", "frame", "token", "sequence")


@dataclass(frozen=True)
class Row:
    """What a simulated second held and what it cost."""

    main_s: float  # of Redis' main thread
    amounts: tuple[float, ...]  # in the order of FEATURES
    slow: int


def row_of(seen: Figures) -> Row:
    """In simulated seconds."""
    level, slow = seen.level, seen.level.slow
    tokens, sequences = slow * seen.tokens / seen.took, slow * seen.sequences / seen.took
    frames = slow * seen.calls("publish") if seen.tokens else 0.0
    return Row(slow * seen.main, (level.workers, level.apis, frames, tokens, sequences), slow)


def main() -> int:
    """Measure, print, fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", nargs="*", help=f"of {', '.join(LEVELS)}; default: all")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--commands", action="store_true")
    chosen = parser.parse_args()
    print("level              slow | Redis' thread  commands  sent MB |  frames   tokens sequences  kept | simulators' cores")
    rows: dict[str, Row] = {}
    for name in chosen.level or LEVELS:
        seen = measure(LEVELS[name], max(chosen.seconds, 2.0 * LEVELS[name].slow), chosen.processes, chosen.commands)
        row = rows[name] = row_of(seen)
        slow = seen.level.slow
        _, _, frames, tokens, sequences = row.amounts
        sent = slow * (seen.after.sent_bytes - seen.before.sent_bytes) / seen.took / 1e6
        kept = tokens / seen.level.offered if seen.level.offered else 1.0
        print(
            f"{name:18} {slow:4d} | {100 * row.main_s:12.1f}% {slow * seen.calls():9,.0f} {sent:8.1f} | {frames:7,.0f} "
            f"{tokens:8,.0f} {sequences:9.1f} {kept:5.2f} | {seen.simulators_s / seen.took:.2f}",
            flush=True,
        )
        if chosen.commands:
            from tests.bench.redis_scaling import show
            show(seen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
