"""A spare: a worker process that has imported MLX and the engine, and waits to be told its model.

Importing them takes seconds of a processor, as long as loading a small model. The host (`workers.py`) writes lines
of JSON to the spare's stdin. `{"describe": settings}` is answered with what the host has to know of a model
(`describe.py`), of which no weight is read. After `{"serve": settings}` it is a worker like any other, and stdin is its
lifeline. The engine's thread begins only then.
"""

import importlib
import json
import os
import sys

import msgspec

from mlx_model import fast_blas
from shared.process import start_reports
from worker.host.describe import describe

VARIABLE = "PARALLM_WAITS_FOR_MODEL"
_NEEDED = ("worker.engine_watch", "worker.group.engine_rank", "worker.guest", "worker.process")


def wait_for_model() -> None:
    """Where this process is a spare, take its settings into the environment; it ends where the host has ended."""
    if os.environ.pop(VARIABLE, "") != "1":
        return
    fast_blas.install()  # before MLX
    for module in _NEEDED:
        importlib.import_module(module)
    while not (settings := (order := _order()).get("serve")):
        start_reports.write(msgspec.json.encode(describe(order["describe"])))
    os.environ.update(settings)


def _order() -> dict[str, dict[str, str]]:
    line = b""
    while not line.endswith(b"\n"):  # the host sends a line only when the one before it is answered
        part = os.read(0, 1 << 16)
        if not part:
            sys.exit(0)
        line += part
    order: dict[str, dict[str, str]] = json.loads(line)
    return order
