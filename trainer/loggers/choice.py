"""The packages that a run logs to: `--logger wandb --logger mlflow`, `--logger wandb,mlflow`, or a list in YAML."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_settings import NoDecode

from shared.errors import SetupError

LoggerName = Literal["wandb", "mlflow", "trackio"]


def _names(given: Any) -> Any:
    """A list of names, each once; environment variables and YAML may have a text with commas."""
    if isinstance(given, str):
        given = json.loads(given) if given.startswith("[") else given.split(",")
    if not isinstance(given, list):
        return given
    parts = (part.strip() for item in given for part in (item.split(",") if isinstance(item, str) else [item]))
    return list(dict.fromkeys(part for part in parts if part))


LoggerNames = Annotated[list[LoggerName], NoDecode, BeforeValidator(_names)]


class LoggerSettings(BaseModel):
    """Part of TrainSettings: who is shown a run, and what of it."""

    tensorboard: Path | None = Field(default=None, description="folder for TensorBoard's events; needs the extra")
    show_samples: int = Field(
        default=4,
        ge=0,
        le=32,
        description="samples of a train step that are shown with their rewards, from the highest to the lowest: in the "
        "log, on the dashboard, in samples.jsonl",
    )
    logger: LoggerNames = Field(
        default=[],
        description="wandb, mlflow, trackio: where each train step's figures are sent; needs the extra of that name",
    )
    logger_project: str = Field(default="mlx-parallm", min_length=1, description="project of the run at these loggers")

    logger_samples: bool = Field(
        default=False, description="send the shown samples to loggers, too: prompts and replies"
    )

    def check_loggers(self) -> None:
        """SetupError when a package is missing, or when samples would go nowhere."""
        check_installed(self.logger)
        if self.logger_samples and not (self.logger and self.show_samples):
            raise SetupError("--logger-samples goes with a --logger, and with --show-samples above 0")


def check_installed(names: Sequence[str]) -> None:
    """SetupError that names the extra of a package that is missing; nothing is imported, which would take seconds."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of this name, such as W&B makes for its files, is no package
            raise SetupError(f"--logger {name} needs the extra: pip install 'mlx-parallm[{name}]'")
