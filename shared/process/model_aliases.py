"""Names of models: as on the hub, as in the API, and others by which requests may call them (`--model-alias`)."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


def _checked(aliases: list[str]) -> list[str]:
    for alias in aliases:
        if not all(part.strip() for part in alias.partition("=")):
            raise ValueError(f"{alias!r} is not GLOB=NAME, such as claude-*=tiny")
    return aliases


ModelAliases = Annotated[list[str], AfterValidator(_checked)]


def short_name(model: str) -> str:
    """The name in the API of a model that is given none: the last part of its folder, hub name or GGUF file."""
    return model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def is_hub_name(model: str) -> bool:
    """True if a model that is no folder here may be one of the hub."""
    return model.count("/") == 1 and not model.startswith((".", "~", "/"))


def hub_folder(name: str) -> Path:
    """The folder of a model in the cache of the hub's library, which need not be there."""
    from huggingface_hub import constants  # only where a model comes from there

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def meant_by(name: str, aliases: Sequence[str]) -> str | None:
    """The name that the first matching alias stands for; None if no alias matches."""
    return next((target for glob, target in _pairs(aliases) if fnmatchcase(name, glob)), None)


def plain_names(aliases: Sequence[str]) -> dict[str, str]:
    """The aliases that are names, not globs, and what each stands for."""
    names = [glob for glob, _ in _pairs(aliases) if not any(letter in glob for letter in "*?[")]
    return {name: meant_by(name, aliases) or "" for name in names}


def _pairs(aliases: Sequence[str]) -> Iterator[tuple[str, str]]:
    for alias in aliases:
        glob, _, name = alias.partition("=")
        yield glob.strip(), name.strip()
