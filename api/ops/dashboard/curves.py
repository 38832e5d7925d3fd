"""Data that the charts draw: plain columns of numbers, time in Unix seconds first; None is a gap.

A chart is `{"x": [...], "series": [[...], ...]}`; which series it has, and their names, stands in its template, and
those of training in TRAINING.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

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


class TrainingChart(NamedTuple):
    """A chart of a run; `series`: what a series is called, and the field of a point that it draws."""

    name: str
    title: str
    unit: str
    series: dict[str, str]


_RL = (
    TrainingChart(
        "reward", "Reward", "", {"batch": "reward", "held out": "held_out", "held out, true": "held_out_true"}
    ),
    TrainingChart("loss", "Loss", "", {"loss": "loss", "of values": "value_loss"}),
    TrainingChart("kl", "KL to the base", "", {"k3": "kl"}),
    TrainingChart("lag", "Lag", "versions", {"oldest token": "lag_max", "mean": "lag_mean"}),
    TrainingChart("entropy", "Entropy", "nats", {"per token": "entropy"}),
    TrainingChart("speed", "Learned from", "tok/s", {"tokens": "tokens_per_s"}),
)
_PPO = (
    TrainingChart("reward", "Mean return", "", {"episodes": "reward", "evaluated": "held_out"}),
    TrainingChart("loss", "Loss", "", {"loss": "loss", "of values": "value_loss"}),
    TrainingChart("kl", "KL to the version that acted", "", {"per step": "kl"}),
    TrainingChart("values", "Variance explained by values", "", {"share": "explained"}),
    TrainingChart("entropy", "Entropy", "nats", {"per step": "entropy"}),
    TrainingChart("clipped", "Clipped", "", {"share": "clip_fraction"}),
)
_DATA = (
    TrainingChart("held_out", "Held-out share correct", "", {"share": "held_out_right"}),
    TrainingChart("loss", "Loss", "", {"loss": "loss", "held out": "held_out_loss"}),
    TrainingChart("gradient", "Norm of the gradient", "", {"norm": "grad_norm"}),
)
TRAINING = {"": _RL, "rl": _RL, "ppo": _PPO}  # by the run's mode; of all others: _DATA


def charts_of(mode: str) -> tuple[TrainingChart, ...]:
    """The charts of a run that learns by this mode."""
    return TRAINING.get(mode, _DATA)


def training_charts(mode: str, points: Sequence[TrainingPoint]) -> dict[str, Chart]:
    """The curves of a run, by train step."""
    step = max(1, -(-len(points) // POINTS))
    shown = [point for i, point in enumerate(points) if i % step == 0 or i == len(points) - 1]
    x = [point.train_step for point in shown]
    return {
        chart.name: {"x": x, "series": [[getattr(point, field) for point in shown] for field in chart.series.values()]}
        for chart in charts_of(mode)
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
