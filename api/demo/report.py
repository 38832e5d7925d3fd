"""The demo's figures: what a job's trajectories add up to, as a table, JSON and a picture."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.jobs import JobStatus
from shared.trajectories import Trajectory


@dataclass
class JobReport:
    """One job's figures, added up line by line."""

    name: str
    status: JobStatus
    samples: int = 0
    tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    tokens_by_worker: Counter[str] = field(default_factory=Counter)

    def add(self, trajectory: Trajectory) -> None:
        """Count one line of a job's results."""
        tokens = len(trajectory.completion_ids)
        self.samples += 1
        self.tokens += tokens
        self.tokens_by_worker[trajectory.worker] += tokens
        if trajectory.reward is not None and trajectory.reward.value is not None:
            self.rewards.append(trajectory.reward.value)
        if trajectory.timings.first_token_ms:
            self.first_token_ms.append(trajectory.timings.first_token_ms - trajectory.timings.enqueued_ms)

    @property
    def seconds(self) -> float:
        """From the job's first sequence to its end."""
        return max(1e-3, (self.status.finished_ms - self.status.started_ms) / 1000)

    def figures(self) -> dict[str, Any]:
        """The figures of the job in summary.json."""
        return {
            "job": self.status.id,
            "status": self.status.status,
            "samples": self.samples,
            "completion_tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "first_token_ms": spread(self.first_token_ms),
            "mean_reward": self.status.mean_reward,
            "tokens_by_worker": dict(self.tokens_by_worker),
        }


def percentile(values: list[float], percent: float) -> float:
    """Nearest-rank percentile; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def spread(values: list[float]) -> dict[str, float]:
    """The median and the 99th percentile."""
    return {"p50": percentile(values, 50), "p99": percentile(values, 99)}


def show_table(console: Console, reports: list[JobReport], took_s: float) -> None:
    """Print a table with one row for each job."""
    table = Table("job", box=None, padding=(0, 2))
    for heading in ("samples", "tokens", "tok/s", "first token p50 / p99, ms", "mean reward"):
        table.add_column(heading, justify="right")
    table.add_column("tokens by worker")
    for report in reports:
        figures = report.figures()
        first = figures["first_token_ms"]
        reward = figures["mean_reward"]
        table.add_row(
            report.name,
            str(report.samples),
            str(report.tokens),
            f"{figures['tokens_per_s']:.0f}",
            f"{first['p50']:.0f} / {first['p99']:.0f} ms",
            "-" if reward is None else f"{reward:.3f}",
            ", ".join(f"{worker}: {tokens}" for worker, tokens in sorted(report.tokens_by_worker.items())),
        )
    console.print(table)
    total = sum(report.tokens for report in reports)
    console.print(f"  together {total} tokens, {total / took_s:.0f} tok/s")


def write_summary(path: Path, reports: list[JobReport], chat_first_token_ms: list[float], took_s: float) -> None:
    """Write the figures of all jobs to summary.json."""
    summary = {
        "seconds": round(took_s, 3),
        "jobs": {report.name: report.figures() for report in reports},
        "chat_first_token_ms": spread(chat_first_token_ms),
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")


def plotting() -> Any:
    """matplotlib, for pictures without a screen; loaded here because it takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write_histogram(path: Path, reports: list[JobReport]) -> None:
    """Rewards per job as a picture."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(1, len(reports), figsize=(5 * len(reports), 3.2), squeeze=False)
    for axis, report in zip(axes[0], reports, strict=True):
        axis.hist(report.rewards, bins=10, range=(0, 1), color="#3b6ea5")
        mean = sum(report.rewards) / max(1, len(report.rewards))
        axis.set_title(f"{report.name}: {len(report.rewards)} samples, mean {mean:.3f}")
        axis.set_xlabel("reward")
        axis.set_ylabel("samples")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
