"""The figures of a train step by the names under which boards have them: `group/figure` of metrics.jsonl."""

from collections.abc import Iterator, Mapping
from typing import Any

GROUPS = {
    "rollout": (
        "reward", "reward_std", "held_out", "held_out_true", "completion_tokens", "groups", "taught", "failed",
        "overlong", "zero_variance",
    ),
    "policy": (
        "loss", "kl", "entropy", "clip_fraction", "grad_norm", "update_rms", "learning_rate", "value_loss", "explained",
    ),
    "staleness": ("lag_mean", "lag_max", "dropped", "mismatch", "mismatch_max", "staleness", "staleness_max"),
    "curriculum": ("tasks_solved", "tasks_hopeless", "tasks_unseen", "difficulty", "wanted_difficulty"),
    "speed": ("tokens", "tokens_per_s", "wait_s", "train_s", "publish_s"),
    "run": ("policy_step", "version"),
}  # fmt: skip


def by_name(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures of a line of metrics.jsonl; those that were not measured are left out."""
    for group, names in GROUPS.items():
        for name in names:
            if values[name] is not None:
                yield f"{group}/{name}", values[name]
