"""Nothing of ours unpickles: what arrives from Redis or from a user is data, not code."""

import ast
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.adapter_files.formats import prepare
from shared.errors import ParallmError
from shared.frames import decode_events, decode_frame
from shared.redis.jobs.ticks import deserialize
from shared.sequences import decode_result, decode_spec
from tests.unit.adapter_files import mlx_config

ROOT = Path(__file__).parents[2]
UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch"}
BUILTINS = {"eval", "exec", "compile", "__import__"}


class Trap:
    """Unpickling it would be noticed."""

    sprung = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (setattr, (Trap, "sprung", True))


def sources() -> list[Path]:
    return [
        path
        for package in ("api", "mlx_model", "ranks", "shared", "worker", "trainer")
        for path in (ROOT / package).rglob("*.py")
    ]


def test_no_module_of_ours_imports_what_unpickles_or_runs_text() -> None:
    found: list[str] = []
    words = UNPICKLERS | BUILTINS | {"allow_pickle"}
    for path in sources():
        text = path.read_text()
        if not any(word in text for word in words):
            continue
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.func.id}()")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} allow_pickle")
            found += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in names if name in UNPICKLERS]
    assert len(sources()) > 100
    assert found == []


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("read", [decode_spec, decode_result, decode_frame, decode_events, deserialize])
def test_a_pickle_among_messages_is_refused_and_not_run(read: Any, protocol: int) -> None:
    data = pickle.dumps(Trap(), protocol)
    with pytest.raises((msgspec.DecodeError, ParallmError, UnicodeDecodeError)):
        read(data)
    assert not Trap.sprung


def test_a_pickle_in_an_adapter_s_place_is_refused_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "adapters.safetensors"
    path.write_bytes(pickle.dumps({"weights": Trap()}))
    with pytest.raises(ParallmError):
        prepare(msgspec.json.encode(mlx_config()), path, tmp_path)
    assert not Trap.sprung
