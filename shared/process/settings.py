"""One settings model per process: flags > environment (`PARALLM_*`) > YAML > defaults; unknown keys fail.

`load(ServeSettings, argv)` parses a command line. `--config FILE` (or `PARALLM_CONFIG`) names the YAML file;
`--dry-run` checks what a start would check, prints what was resolved, secrets hidden, and exits.
"""

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import CliSettingsSource

from shared.errors import SetupError
from shared.process import nested_config
from shared.process.foreign_flags import native
from shared.process.host_settings import one_model_each
from shared.process.panels import in_panels
from shared.process.process_settings import ProcessSettings
from shared.process.serve_settings import ServeSettings

S = TypeVar("S", bound=ProcessSettings)


def version() -> str:
    """Version of the installed package; "unknown" where the code runs without one."""
    try:
        return importlib.metadata.version("mlx-parallm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def load(
    kind: type[S],
    argv: list[str] | None = None,
    under: Mapping[str, Any] = {},
    over: Mapping[str, Any] = {},
    rehearse: Callable[[S], str] = lambda settings: "",
) -> S:
    """Settings of one process from a command line, the environment and YAML; `under` and `over` the command line's.

    `rehearse` makes the checks of a start for `--dry-run`, and returns what is printed after the settings. Raises
    SetupError naming the wrong key; exits 0 after `--help`, `--version` and `--dry-run`.
    """
    args = one_model_each(native(list(sys.argv[1:] if argv is None else argv), kind.flags()))
    if "--version" in args:
        print(version())
        raise SystemExit(0)
    given = _settings_file(args)
    configured: type[S] = type(kind.__name__, (kind,), {"__module__": kind.__module__})
    source: CliSettingsSource[Any] = CliSettingsSource(
        configured, cli_parse_args=args, cli_prog_name=Path(sys.argv[0]).name, **in_panels(kind.panels)
    )
    try:
        flags = source()
        configured.from_file = _own_part(kind, given)
        settings = configured(**{**under, **flags, **over})
    except ValidationError as error:
        raise SetupError("bad settings: " + "; ".join(_complaint(kind, e) for e in error.errors())) from error
    result = cast(S, kind.model_construct(settings.model_fields_set, **settings.model_dump()))
    if result.dry_run:
        os.environ.pop("PARALLM_DRY_RUN", None)  # settings that `rehearse` loads are not to be printed there
        result.check()
        further = rehearse(result)
        print(result.resolved() + further, end="")
        raise SystemExit(0)
    return result


def _settings_file(args: Sequence[str]) -> dict[str, Any]:
    """Content of the file of `--config`, else of `PARALLM_CONFIG`; SetupError if it is not there or has no settings."""
    name = os.environ.get("PARALLM_CONFIG", "")
    for i, arg in enumerate(args):
        if arg == "--config" and i + 1 < len(args):
            name = args[i + 1]
        elif arg.startswith("--config="):
            name = arg.split("=", 1)[1]
    if not name:
        return {}
    path = Path(name)
    if not path.is_file():
        raise SetupError(f"--config {name}: no such file")
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise SetupError(f"--config {name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise SetupError(f"--config {name}: settings are lines of `name: value`")
    return content or {}


def _own_part(kind: type[ProcessSettings], content: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a settings file that this process takes; SetupError for what no process has."""
    rank = kind.model_fields["lora_rank"].default if "lora_rank" in kind.model_fields else 0
    names, server = (nested_config.snake(each.flags()) for each in (kind, ServeSettings))
    return nested_config.flat(content, names, server=server, trains=kind.is_trainer, default_rank=rank)


def _complaint(kind: type[ProcessSettings], error: ErrorDetails) -> str:
    """One wrong setting: which, and why; for a name that there is not, the nearest that there is."""
    name = ".".join(map(str, error["loc"])) or "settings"
    if error["type"] != "extra_forbidden":
        return f"{name}: {error['msg'].removeprefix('Value error, ')}"
    known = sorted(each.replace("-", "_") for each in kind.flags() if each.islower())
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name}: there is no such setting" + (f"; did you mean {near[0]}?" if near else "")
