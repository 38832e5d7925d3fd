"""A real worker process with a fault: its engine blocks or dies, or it is killed, over a sequence whose seed says so.

`python -m tests.e2e.faulty_worker ARGUMENTS OF mlx_parallm_worker`.
"""

import ctypes
import os
import signal
import sys
import threading
from typing import Any

from mlx_model import fast_blas

fast_blas.install()

from worker import __main__ as command  # noqa: E402
from worker import process  # noqa: E402
from worker.engine.messages import StepOutput  # noqa: E402
from worker.engine.orders import Submit  # noqa: E402
from worker.engine.thread import EngineThread  # noqa: E402

BLOCK, DIE, FREEZE, KILL = FAULTS = (1001, 1002, 1003, 1004)  # seeds; FREEZE never gives the interpreter back
TOKENS = 8  # that the sequence has before the fault


class FaultyEngineThread(EngineThread):
    """Looks at every turn's events; the fault strikes in thread G."""

    def __init__(self, config: Any, on_step: Any, *rest: Any) -> None:
        self._seeds: dict[str, int] = {}

        def look(output: StepOutput) -> None:
            on_step(output)
            for event in output.events:
                if event.position >= TOKENS and (seed := self._seeds.get(event.seq)) is not None:
                    strike(seed)

        super().__init__(config, look, *rest)

    def send(self, order: Any, done: Any = None) -> None:
        requests = order.requests if isinstance(order, Submit) else ()
        self._seeds.update({r.spec.id: r.spec.sampling.seed for r in requests if r.spec.sampling.seed in FAULTS})
        super().send(order, done)


def strike(seed: int) -> None:
    if seed == BLOCK:
        threading.Event().wait()
    elif seed == DIE:
        raise MemoryError("struck")
    elif seed == FREEZE:
        ctypes.PyDLL(None).sleep(1000)
    elif seed == KILL:
        os.kill(os.getpid(), signal.SIGKILL)


process.EngineThread = FaultyEngineThread  # type: ignore[misc]
if __name__ == "__main__":
    sys.exit(command.main())
