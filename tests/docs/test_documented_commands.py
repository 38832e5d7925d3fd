"""Every command that the README, docs/, the Makefile and the benchmarks name is there and takes the flags named.

What CI can afford is run for real elsewhere (tests/docs/served, tests/e2e); here each program is asked for its
help, which imports all of it.
"""

import contextlib
import importlib.util
import io
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

import api.cli.main
import api.serve.main
import trainer.__main__
import trainer.service.__main__
import worker.__main__
from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "Makefile")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("tests/bench/*.py")),
]
TEXT = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
BEFORE_HELP = {"tests.training.run": [str(ROOT / "trainer/recipes/tiny-arithmetic.yaml")]}  # its first argument
PROGRAMS = {
    "mlx_parallm_serve": api.serve.main.main,
    "mlx_parallm_worker": worker.__main__.main,
    "mlx_parallm_train": trainer.__main__.main,
    "mlx_parallm_learners": trainer.service.__main__.main,
}


def uses(pattern: str) -> dict[str, set[str]]:
    """name -> the flags that some page gives it: those behind it in the same line, up to the command's end."""
    found: dict[str, set[str]] = {}
    for match in re.finditer(pattern + r"(?P<rest>[^\n`;|>#]*)", TEXT):
        found.setdefault(match["name"], set()).update(FLAG.findall(match["rest"]))
    return found


PYTHON = r"(?:python3?|\.venv/bin/python|\$\(BIN\)/python) -m "
MODULES = uses(PYTHON + r"(?P<name>(?:api|worker|trainer|shared|tests)\.[a-z0-9_.]*[a-z0-9_])")
GROUPED = r"adapters [a-z]+|models (?:add|list|set|(?:un)?pin|(?:un)?load|rm)"
COMMANDS = uses(rf"\bmlx_parallm (?P<name>{GROUPED}|(?!or\b|and\b|for\b)[a-z]+(?: (?:new|hash))?)(?= )")


def said(run: object, *arguments: str) -> str:
    """What a program prints of itself before it exits with 0."""
    out = io.StringIO()
    argv = mock.patch.object(sys, "argv", ["program", *arguments])
    with argv, contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        run()  # type: ignore[operator]
    assert ended.value.code in (0, None), out.getvalue()
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_that_is_named_runs(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"there is no module {name}"
    if spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{name}.__main__")
    assert spec is not None and spec.origin is not None
    if not MODULES[name] and "ArgumentParser" not in Path(spec.origin).read_text():
        return  # it knows no --help
    told = said(
        lambda: runpy.run_module(name, run_name="__main__", alter_sys=True), *BEFORE_HELP.get(name, []), "--help"
    )
    assert MODULES[name] <= set(FLAG.findall(told))


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_takes_the_flags_that_are_named(name: str) -> None:
    named = uses(rf"\b(?P<name>{name})\b(?!\.)")[name]
    assert named, "no page names it"
    assert named <= set(FLAG.findall(said(PROGRAMS[name], "--help")))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_of_the_client_takes_the_flags_that_are_named(name: str) -> None:
    told = CliRunner().invoke(api.cli.main.app, [*name.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert told.exit_code == 0, told.output
    assert COMMANDS[name] <= set(FLAG.findall(told.output))


def test_a_command_of_the_client_loads_nothing_of_a_server() -> None:
    heavy = "{'numpy', 'pydantic_settings', 'redis', 'tokenizers'}"
    code = f"import sys, api.cli.main; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_makefile_has_the_targets_that_are_named() -> None:
    targets = set(re.findall(r"`make ([a-z]+)", TEXT)) | set(re.findall(r"^make ([a-z]+)", TEXT, re.M))
    assert {"demo", "test", "quick", "bench", "clients", "chaos"} <= targets
    for target in targets:
        asked = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert asked.returncode == 0, asked.stderr


def test_a_real_client_s_script_is_run_by_an_interpreter_that_is_named_from_here() -> None:
    """`make clients` names its interpreter relative to the checkout, and the scripts run in a folder of their own."""
    python = Path(sys.executable)
    relative = python.relative_to(ROOT) if python.is_relative_to(ROOT) else python
    command = [sys.executable, "-m", "tests.clients", "--python", str(relative), "openai_python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 0 failed" in done.stdout
