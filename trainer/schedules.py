"""Learning-rate schedules: pure functions of the train step, so that a resumed run needs only its step number."""

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Warm-up from 0 to `peak`, then `name` down to `peak * final_fraction` at `total_steps`, and constant after."""

    name: ScheduleName = "constant"
    peak: float = 1e-5
    warmup_steps: int = 0
    total_steps: int = 0  # 0 with `constant` only
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.name != "constant" and self.total_steps <= self.warmup_steps:
            steps = f"{self.total_steps} total, {self.warmup_steps} warm-up"
            raise ValueError(f"schedule {self.name!r} needs more total steps than warm-up steps: {steps}")

    def rate(self, step: int) -> float:
        """The learning rate of train step `step`, counted from 0; the first one already learns."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.name == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        remaining = 1 - progress if self.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * remaining)
