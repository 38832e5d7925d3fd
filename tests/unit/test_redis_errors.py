"""The text of a Redis error may hold a prompt: nobody makes one (tests/redis/test_refusals.py asks real servers)."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
CAUGHT = {"RedisError", "ResponseError", "REDIS_AWAY", "_AWAY"}


def _catches_redis(handler: ast.ExceptHandler) -> bool:
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(handler.type or ast.Constant(0))}
    return bool(names & CAUGHT)


def _shown(handler: ast.ExceptHandler) -> list[int]:
    """Lines that make text of the caught error."""
    found: list[int] = []
    for node in ast.walk(handler):
        match node:
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]) if name == handler.name:
                found.append(node.lineno)
            case ast.FormattedValue(value=ast.Name(id=name)) if name == handler.name:
                found.append(node.lineno)
    return found


def test_nobody_makes_text_of_a_redis_error() -> None:
    wrong: list[str] = []
    for package in ("api", "mlx_model", "ranks", "shared", "worker", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if any(name in text for name in CAUGHT) else ():
                if isinstance(node, ast.ExceptHandler) and _catches_redis(node):
                    wrong += [f"{path.relative_to(ROOT)}:{line}" for line in _shown(node)]
    assert wrong == [], "tell shared.redis.connection.faults.reason(error) instead"
