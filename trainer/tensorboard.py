"""The figures of metrics.jsonl as TensorBoard scalars: the extra `tensorboard`, `--tensorboard DIR`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import SetupError

_GROUPS = {
    "rollout": ("reward", "reward_std", "held_out", "completion_tokens", "failed", "overlong", "zero_variance"),
    "policy": ("loss", "kl", "entropy", "clip_fraction", "grad_norm", "update_rms", "learning_rate"),
    "staleness": ("lag_mean", "lag_max", "dropped", "mismatch", "mismatch_max", "staleness", "staleness_max"),
    "speed": ("tokens", "tokens_per_s", "wait_s", "train_s", "publish_s"),
    "run": ("policy_step", "version"),
}


class TensorBoardLog:
    """Writes one event a figure and train step; figures that were not measured are left out.

    Events of train steps from `first_step` on, which a killed run may have written, are hidden by TensorBoard.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise SetupError("--tensorboard needs the extra: pip install 'mlx-parallm[tensorboard]'") from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, train_step: int, values: Mapping[str, Any]) -> None:
        """All figures of a train step."""
        for group, names in _GROUPS.items():
            for name in names:
                if values[name] is not None:
                    self._writer.add_scalar(f"{group}/{name}", values[name], train_step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()
