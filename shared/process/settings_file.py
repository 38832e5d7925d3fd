"""Which settings file a process reads: that of `--config`, else that of `PARALLM_CONFIG`."""

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from shared.errors import SetupError


def named(args: Sequence[str]) -> Path | None:
    """The file that a command line or the environment names; SetupError if it is not there, or holds no settings."""
    name = os.environ.get("PARALLM_CONFIG", "")
    for i, arg in enumerate(args):
        if arg == "--config" and i + 1 < len(args):
            name = args[i + 1]
        elif arg.startswith("--config="):
            name = arg.split("=", 1)[1]
    if not name:
        return None
    path = Path(name)
    if not path.is_file():
        raise SetupError(f"--config {name}: no such file")
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise SetupError(f"--config {name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise SetupError(f"--config {name}: settings are lines of `name: value`")
    return path
