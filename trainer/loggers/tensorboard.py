"""The figures of metrics.jsonl as TensorBoard scalars: the extra `tensorboard`, `--tensorboard DIR`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import SetupError
from trainer.loggers.tracked_run import by_name


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
        for name, value in by_name(values):
            self._writer.add_scalar(name, value, train_step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()
