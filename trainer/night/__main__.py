"""The child process of `mlx_parallm_serve --learn-when ...` that runs night school."""

import asyncio
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from mlx_model import fast_blas
from shared.errors import ParallmError, SetupError
from shared.process import logs
from shared.process.garbage import no_collections
from shared.process.lifeline import follow_parent
from shared.process.open_files import many_files
from shared.process.settings import load
from trainer.runs import stopping
from trainer.settings import TrainSettings


def main(argv: list[str] | None = None) -> int:
    """Run nights until SIGTERM, or until the parent has ended; the process's exit code."""
    try:
        settings = night_settings(argv)
        logs.configure(settings.log_level, settings.log_json)
        fast_blas.install()
        asyncio.run(_run(settings))
    except SetupError as error:
        print(f"night school: {error}", file=sys.stderr)
        return 2
    except ParallmError as error:
        print(f"night school: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    finally:
        stopping.ended()
    return 0


async def _run(settings: TrainSettings) -> None:
    with no_collections(), many_files():  # these import mlx, so only after fast_blas.install
        from trainer.night.school import School

    school, loop = School(settings), asyncio.get_running_loop()
    follow_parent(lambda: loop.call_soon_threadsafe(school.stop))
    await school.run()


class NightSettings(TrainSettings):
    """Settings of night school: those of `trainer/recipes/night.yaml` where no others are given."""

    def check(self) -> None:
        """SetupError where a night's run would refuse."""
        night = self.of_night()
        asked = {"dataset": Path(f"sessions:{night.adapter}"), "teacher": night.teacher or "policy"}
        TrainSettings.check(night.model_copy(update=asked))

    def of_night(self) -> TrainSettings:
        """The settings with the recipe's. Of another mode than a night's only a mistake can speak."""
        recipe: dict[str, Any] = yaml.safe_load(resources.files("trainer").joinpath("recipes/night.yaml").read_bytes())
        given = self.model_fields_set
        if "mode" in given and self.mode != "distill":
            raise SetupError(f"night school learns by --mode distill, not by {self.mode}")
        return self.model_copy(update={name: value for name, value in recipe.items() if name not in given})


def night_settings(argv: list[str] | None = None) -> TrainSettings:
    """Settings of the command line, the environment and YAML, and for the rest the recipe's; checked."""
    settings = load(NightSettings, argv)
    settings.check()
    return settings.of_night()


if __name__ == "__main__":
    sys.exit(main())
