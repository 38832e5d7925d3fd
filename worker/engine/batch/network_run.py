"""Rows of networks in the prefill lane: gathered across requests, computed together between decode steps.

One sequence brings some rows of one request; sequences of one version, whose rows have the same shapes, share a
forward. What it takes is done in pieces, a few milliseconds in a turn. An error ends its own sequence, or, when the
forward itself fails, those that share it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np

from mlx_model.networks.network import Network, Pieces
from shared.errors import EngineError, ParallmError, UnsupportedModelError
from shared.frames import Finish
from shared.networks.shapes import NetworkPlan
from shared.networks.tensors import Tensors, check_tensors, pack, unpack
from worker.engine.batch.row import Row
from worker.engine.batch.row_model import RowModel

log = logging.getLogger(__name__)

MOST_ROWS = 512  # of one forward
TURN_S = 0.005  # until which, from its beginning, a turn of the engine goes on with networks; a first piece it runs


class NetworkRows:
    """The inputs of one sequence for a network, and its outcome."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.outcome: Tensors | ParallmError | None = None  # None: it is not over
        self._run: _Run | None = None
        self._inputs: Tensors = {}
        self._plan: NetworkPlan | None = None  # None: not checked yet

    def advance(self, model: RowModel, others: Iterable[NetworkRows], opened: float) -> None:
        """Go on with the forward that it is part of, as far as the turn that was opened then has time.

        Among several ranks by one piece, whatever the time. It begins with those of the others that fit.
        """
        if self.outcome is None and self._run is None:
            self._begin(model, others)
        until = opened + TURN_S
        while self.outcome is None and self._run is not None:
            began = time.perf_counter()
            self._run.work()
            now = time.perf_counter()
            if model.is_divided or now + (now - began) > until:  # the next piece will take about as long
                return

    def report(self) -> tuple[bytes | None, Finish]:
        """The packed outputs, or None with the error, after the run has ended."""
        if isinstance(self.outcome, ParallmError):
            return None, Finish.failed(self.outcome)
        assert self.outcome is not None, "reported before it is over"
        return pack(self.outcome), Finish("stop")

    def look(self, network: Network) -> bool:
        """Unpack and check the inputs; False if they do not fit the network, which ends the sequence."""
        if self._plan is None and self.outcome is None:
            try:
                self._inputs = unpack(self.row.spec.tensors)
                self._plan = check_tensors(network.spec, self._inputs)
            except ParallmError as error:
                self.outcome = error
        return self.outcome is None

    @property
    def waits(self) -> bool:
        """True if it has neither started nor ended."""
        return self.outcome is None and self._run is None

    @property
    def count(self) -> int:
        """Number of rows in the inputs."""
        return len(next(iter(self._inputs.values())))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of one row by input; sequences with equal shapes run together."""
        return {name: each.shape[1:] for name, each in self._inputs.items()}

    def _begin(self, model: RowModel, others: Iterable[NetworkRows]) -> None:
        try:
            network = model.network(self.row)
        except ParallmError as error:
            self.outcome = error
            return
        if not self.look(network):
            return
        assert self._plan is not None, "looked at"
        most, count, together = self._plan.rows(MOST_ROWS), self.count, [self]
        for other in others:
            if other is self or not (other.waits and other.look(network) and other.shapes == self.shapes):
                continue
            if count + other.count > most:
                break
            together.append(other)
            count += other.count
        inputs = {name: np.concatenate([each._inputs[name] for each in together]) for name in self._inputs}
        run = _Run(together, network.run(inputs))
        for each in together:
            each._run = run


def is_spent(opened: float) -> bool:
    """True if the turn opened at `opened` (perf_counter, s) has used its time for networks."""
    return time.perf_counter() > opened + TURN_S


class _Run:
    """A forward of several sequences."""

    def __init__(self, together: Sequence[NetworkRows], pieces: Pieces) -> None:
        self._together = together
        self._pieces = pieces

    def work(self) -> None:
        """One piece; after the last one all are over."""
        try:
            next(self._pieces)
        except StopIteration as end:
            self._hand_out(end.value)
        except Exception as error:
            log.exception("engine.network_failed seq=%s", self._together[0].row.spec.id)
            for each in self._together:
                each.outcome = EngineError(f"{type(error).__name__}: {error}")

    def _hand_out(self, outputs: Tensors) -> None:
        begin = 0
        for each in self._together:
            own = {name: output[begin : begin + each.count] for name, output in outputs.items()}
            begin += each.count
            wrong = next((name for name, output in own.items() if not np.isfinite(output).all()), None)
            each.outcome = own
            if wrong is not None:
                version = each.row.spec.adapter
                each.outcome = UnsupportedModelError(f"{version}: output {wrong!r} is no finite number", param="model")
