"""What the charts draw: plain columns of numbers, time in Unix seconds first; None is a gap.

A chart is `{"x": [...], "series": [[...], ...]}`; which series it has, and their names, stands in its template.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from api.ops.ring_view import RingSample
from shared.training import TrainingPoint

Chart = dict[str, list[Any]]

POINTS = 300  # drawn at most


def ring_charts(history: Sequence[RingSample]) -> dict[str, Chart]:
    """Throughput, load and latency of the last hour, from differences between samples."""
    pairs = list(pairwise(history))
    x = [after.at_ms / 1000 for _, after in pairs]
    return {
        "throughput": {
            "x": x,
            "series": [
                [_rate(a.tokens, b.tokens, a, b) for a, b in pairs],
                [_rate(a.prompt_tokens, b.prompt_tokens, a, b) for a, b in pairs],
            ],
        },
        "load": {
            "x": x,
            "series": [
                [b.running for _, b in pairs],
                [b.waiting.get("interactive", 0) for _, b in pairs],
                [b.waiting.get("batch", 0) for _, b in pairs],
            ],
        },
        "first_token": {
            "x": x,
            "series": [[_mean(a.first_token_s, b.first_token_s, a.first_tokens, b.first_tokens) for a, b in pairs]],
        },
        "gap": {"x": x, "series": [[_mean(a.gap_s, b.gap_s, a.gaps, b.gaps) for a, b in pairs]]},
    }


def training_charts(points: Sequence[TrainingPoint]) -> dict[str, Chart]:
    """The curves of a run, by train step."""
    step = max(1, -(-len(points) // POINTS))
    shown = [point for i, point in enumerate(points) if i % step == 0 or i == len(points) - 1]
    x = [point.train_step for point in shown]
    return {
        "reward": {
            "x": x,
            "series": [[p.reward for p in shown], [p.held_out for p in shown], [p.held_out_true for p in shown]],
        },
        "loss": {"x": x, "series": [[p.loss for p in shown], [p.value_loss for p in shown]]},
        "kl": {"x": x, "series": [[p.kl for p in shown]]},
        "entropy": {"x": x, "series": [[p.entropy for p in shown]]},
        "lag": {"x": x, "series": [[p.lag_max for p in shown], [p.lag_mean for p in shown]]},
        "speed": {"x": x, "series": [[p.tokens_per_s for p in shown]]},
    }


def _rate(before: float, after: float, a: RingSample, b: RingSample) -> float | None:
    """Per second; a total that has shrunk began anew."""
    if b.at_ms <= a.at_ms or after < before:
        return None
    return round(1000 * (after - before) / (b.at_ms - a.at_ms), 2)


def _mean(sum_before: float, sum_after: float, count_before: float, count_after: float) -> float | None:
    """In milliseconds; None where nothing was observed."""
    if count_after <= count_before or sum_after < sum_before:
        return None
    return round(1000 * (sum_after - sum_before) / (count_after - count_before), 2)
