"""No test has a limit of time of its own, which another program's load could break (tests/waiting.py)."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import HANG_S, NEVER_S

BY_HAND = ("tests/bench", "tests/clients")
WAITS = {"timeout": 1, "wait_for": 2, "wait": 1, "join": 1, "result": 1, "poll": 1, "wait_procs": 2}  # arguments
LOOK_S = 3  # a shorter time is a look at what has not come, or may come


def limits(tree: ast.AST) -> Iterator[ast.expr]:
    """What says how long something may take."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (each.value for each in node.keywords if each.arg == "timeout")
            if isinstance(node.func, ast.Attribute) and len(node.args) == WAITS.get(node.func.attr):
                yield node.args[-1]
        elif isinstance(node, ast.BinOp) and ast.unparse(node.left).endswith("monotonic()"):
            yield node.right


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("httpx.get(url, timeout=30)", 1),
        ("process.wait(60)", 1),
        ("await asyncio.wait_for(task, 60)", 1),
        ("until = time.monotonic() + 20", 1),
        ("process.wait(HANG_S)", 0),
        ("async def f():\n    async with asyncio.timeout(0.2): pass", 0),
    ],
)
def test_a_limit_is_seen(line: str, found: int) -> None:
    assert len([each for each in limits(ast.parse(line)) if number(each) > LOOK_S]) == found


def number(value: ast.expr) -> float:
    return float(value.value) if isinstance(value, ast.Constant) and isinstance(value.value, int | float) else 0.0


def test_a_hang_has_the_only_limit_of_time_in_the_tests() -> None:
    own = []
    for file in Path("tests").rglob("*.py"):
        if not str(file).startswith(BY_HAND):
            tree = ast.parse(file.read_text())
            own += [f"{file}:{each.lineno}" for each in limits(tree) if number(each) > LOOK_S]
            own += [str(file)] if "mark." + "timeout" in file.read_text() else []
    assert own == [], "use HANG_S of tests/waiting.py"


def test_a_wait_ends_before_its_test_does(request: pytest.FixtureRequest) -> None:
    limit = float(os.environ["PYTEST_TIMEOUT"])
    assert request.config.pluginmanager.hasplugin("timeout")
    assert (0 < HANG_S < limit < NEVER_S) or limit == 0
