"""What a wheel of this project has in it."""

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.unit.test_rooms import PACKAGES, ROOT

SETUPTOOLS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def data_files() -> Iterator[Path]:
    """Files of our packages that are no Python, as paths from the root."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT)


def is_packed(file: Path) -> bool:
    """Whether the package of a file, or one around it, names it."""
    for folder in file.parents[:-1]:
        patterns = SETUPTOOLS["package-data"].get(".".join(folder.parts), [])
        depth = len(file.parts) - len(folder.parts)
        if any(
            pattern.count("/") + 1 == depth and fnmatch(str(file.relative_to(folder)), pattern) for pattern in patterns
        ):
            return True
    return False


def test_a_wheel_has_all_data_of_its_packages() -> None:
    left_out = [str(file) for file in data_files() if not is_packed(file)]
    assert not left_out, "name them under [tool.setuptools.package-data]"


def test_a_wheel_has_all_packages() -> None:
    named = SETUPTOOLS["packages"]["find"]["include"]
    assert sorted(pattern.removesuffix("*") for pattern in named) == sorted(PACKAGES)


def test_the_changelog_has_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = [line.split(" - ")[0] for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if "## [" in line]
    assert headings[:2] == ["## [Unreleased]", f"## [{version}]"], "the release's workflow looks for it"


def test_what_names_data_finds_some() -> None:
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT.joinpath(*package.split("."))
        assert all(list(folder.glob(pattern)) for pattern in patterns), package
