"""Settings of a worker process that serves several models: a host, which starts one worker for each that it holds."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, Field

_MODEL_FLAGS = ("--model", "--model-path")


class HostSettings(BaseModel):
    """Part of the worker's settings: which models it holds, when it serves several."""

    models: list[str] = Field(
        default=[], description="further models, as --model given several times: this process holds them in turn"
    )
    from_catalogue: bool = Field(
        default=False,
        description="serve the models of the ring's catalogue (mlx_parallm models), too, as requests come",
    )
    catalogue_folders: list[Path] = Field(
        default=[],
        description="with --from-catalogue: folders in which the catalogue may name models of this machine; without "
        "any it may only name those of the hub",
    )
    weights_cache_dir: Path | None = Field(
        default=None,
        description="folder for weights that other hosts of the ring have; with it this host fetches them there before "
        "it asks the hub, and gives its own models' weights to other hosts",
    )
    weights_cache_gb: float = Field(
        default=0,
        ge=0,
        description="size of that folder: new weights take the place of those used least recently that are not "
        "loaded; 0: no bound, and nothing is removed",
    )
    max_loaded_models: int = Field(
        default=0, ge=0, description="models that are in memory at once, at most; 0: as many as fit"
    )
    model_idle_s: float = Field(
        default=0,
        ge=0,
        description="time without a request after which a model is unloaded; 0: when its memory is wanted",
    )
    batch_turn_s: float = Field(
        default=120, gt=0, description="wait after which batch work for a model that is not loaded gets its turn"
    )
    spare_worker: bool = Field(
        default=True, description="have a process ready that has loaded all but a model, so that a load takes less time"
    )

    @property
    def is_host(self) -> bool:
        """True for a process that starts workers in place of being one."""
        return bool(self.models or self.from_catalogue or self.max_loaded_models)


def one_model_each(args: Sequence[str]) -> list[str]:
    """A command line whose second and later `--model` are `--models`."""
    return list(_renamed(args))


def _renamed(args: Sequence[str]) -> Iterator[str]:
    seen = False
    for arg in args:
        flag, equals, value = arg.partition("=")
        is_model = flag in _MODEL_FLAGS
        yield f"--models{equals}{value}" if is_model and seen else arg
        seen |= is_model
