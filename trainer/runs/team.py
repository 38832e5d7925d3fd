"""The file of `--agents`: what several policies that learn at once have in common, and what each has alone.

steps = 200                  # of all: any setting of mlx_parallm_train
task = "my.games:Duel"

[agents.black]               # the policy `black`: its own settings win over flags, and flags over those of all
seed = 1
task_options = {partner = "white"}

[agents.white]
seed = 2
task_options = {partner = "black"}
"""

import tomllib
from pathlib import Path
from typing import Any

from shared.errors import SetupError
from shared.process.process_settings import JoinSettings
from shared.process.settings import load
from trainer.settings import TrainSettings

MOST = 64
_OF_THE_PROCESS = {"model", "dtype", "over_http", "connect_key", "run_dir", "agents", *JoinSettings.model_fields}


def agents_of(argv: list[str] | None, file: Path) -> list[TrainSettings]:
    """Settings of each policy; SetupError when the file or one of them is wrong."""
    try:
        given: dict[str, Any] = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SetupError(f"--agents {file}: {error}") from error
    tables = given.pop("agents", None)
    if not isinstance(tables, dict) or not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise SetupError(f"--agents {file}: it has a table [agents.NAME] for each policy")
    if len(tables) > MOST:
        raise SetupError(f"--agents {file}: {len(tables)} policies, the most are {MOST}")
    if wrong := sorted(given.keys() & {"adapter", "run", "agents"}):
        raise SetupError(f"--agents {file}: {wrong[0]} is each policy's own")
    team = [_agent(argv, file, given, name, table) for name, table in tables.items()]
    for settings in team[1:]:
        if sum(settings.folder == other.folder for other in team) > 1:
            raise SetupError(f"--agents {file}: two policies have the run {settings.run_name!r}")
    return team


def _agent(
    argv: list[str] | None, file: Path, common: dict[str, Any], name: str, table: dict[str, Any]
) -> TrainSettings:
    if wrong := sorted(table.keys() & (_OF_THE_PROCESS | {"adapter"})):
        raise SetupError(
            f"--agents {file}: {wrong[0]} in [agents.{name}]: it is the whole process's, or the table's name"
        )
    try:
        settings = load(TrainSettings, argv, under=common, over={**table, "adapter": name})
        if settings.mode != "rl":
            raise SetupError(f"--mode {settings.mode} learns in a process of its own")
        settings.check()
    except SetupError as error:
        raise SetupError(f"--agents {file}: [agents.{name}]: {error}") from error
    return settings
