"""The ranks that are one engine, as one of them sees them.

Collectives are called by all ranks in the same order and on one stream, that of the batch: two streams of a process
would mix their messages. They are for sums of a forward and for what is agreed at start; who may hang is asked over
another way (`turns.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx


@dataclass(frozen=True)
class Ranks:
    """A group of MLX of more than one rank."""

    group: Any  # mx.distributed.Group

    @property
    def rank(self) -> int:
        """This one's number; 0 leads."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        """How many there are."""
        return int(self.group.size())

    def same(self, values: mx.array) -> mx.array:
        """The leading rank's values, on all of them: machines of different kinds round differently."""
        # A product, so that the sum comes behind what the values depend on on every rank, sums of layers among them.
        own = values * mx.array(self.rank == 0, values.dtype)
        return mx.distributed.all_sum(own, group=self.group)

    def least(self, value: int) -> int:
        """The smallest of all ranks' values, which is agreed on at start."""
        least = mx.distributed.all_min(mx.array([value], mx.int64), group=self.group)
        return int(cast(int, least.item()))

    def most(self, value: float) -> float:
        """The largest of all ranks' values; infinity counts."""
        most = mx.distributed.all_max(mx.array([value], mx.float32), group=self.group)
        return cast(float, most.item())


def ranks_of(group: Any | None) -> Ranks | None:
    """Of a group of MLX; None for one rank alone."""
    return None if group is None or group.size() == 1 else Ranks(group)
