"""Which packages a run logs to: `--logger wandb --logger mlflow`, `--logger wandb,mlflow`, or a list in YAML."""

import importlib.util
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
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


def check_installed(names: Sequence[str]) -> None:
    """SetupError that names the extra of a package that is missing; nothing is imported, which would take seconds."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of this name, such as W&B makes for its files, is no package
            raise SetupError(f"--logger {name} needs the extra: pip install 'mlx-parallm[{name}]'")
