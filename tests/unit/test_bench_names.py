"""`python -m tests.bench`: its command line."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.bench.__main__ import MEASUREMENTS, main

OURS = ("api", "mlx_model", "ranks", "shared", "tests", "trainer", "worker")


def test_a_measurement_that_there_is_not_is_named_beside_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["frames", "framse"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "framse" in said.err and "frames" in said.err and not said.out


def test_help_lists_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name, meaning in MEASUREMENTS.items():
        assert f"  {name} " in said and meaning in said
        assert find_spec(f"tests.bench.{name}") is not None


def test_what_programs_import_that_no_test_runs_is_there() -> None:
    missing = []
    files = [*Path("tests/bench").glob("*.py"), *Path("tests/clients").rglob("*.py"), *Path("examples").glob("*.py")]
    for file in files:
        for module, name in imported(ast.parse(file.read_text())):
            if not (name in defined(module) or find_spec(f"{module}.{name}")):
                missing.append(f"{file}: {module}.{name}")
    assert len(files) > 20 and missing == []


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a program takes from packages of ours, within functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in OURS:
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def defined(module: str) -> set[str]:
    """The names of a module, read without importing it: some of these import MLX."""
    found = find_spec(module)
    assert found is not None and found.origin is not None, module
    names = set()
    for node in ast.walk(ast.parse(Path(found.origin).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
