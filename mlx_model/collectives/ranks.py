"""The ranks that are one engine, as one of them sees them.

Collectives are called by all ranks in the same order and on one stream, that of the batch: two streams of a process
would mix their messages, but where each has links of its own. They are for sums of a forward and for what is agreed at
start; who may hang is asked over another way (`worker/engine/turns.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx

from mlx_model.device import computes_on_cpu, on_cpu, on_cuda

# Arrays of this process that are held until they have come: it has one group, which outlives an engine.
_COMING: deque[mx.array] = deque()
_HELD = 8


@dataclass(frozen=True)
class Ranks:
    """A group of MLX of more than one rank."""

    group: Any  # mx.distributed.Group
    by_sums: bool = False  # hidden states are handed on by sums
    stream: Any = None  # on which ranks exchange; None: that of what they compute
    back: Any = None  # on which what the last rank makes comes back, in parallel with that one

    @property
    def rank(self) -> int:
        """This one's number; 0 leads."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    def same(self, values: mx.array) -> mx.array:
        """The leading rank's values, on all of them: machines of different kinds round differently."""
        if self.overlaps:
            return self._passed_along(values)
        # A product, so that the sum comes after what the values depend on on every rank, sums of layers among them.
        own = values * mx.array(self.rank == 0, values.dtype)
        return mx.distributed.all_sum(own, group=self.group, stream=self.stream)

    @property
    def overlaps(self) -> bool:
        """True if ranks exchange data while they compute."""
        return self.stream is not None

    def _passed_along(self, values: mx.array) -> mx.array:
        """Send from rank to rank: a rank that has passed them on does not wait."""
        values = _begun(values)  # and the sums that they hang on, before what comes after them
        if self.rank > 0:
            values = self.received(values)
        if self.rank < self.size - 1:
            self.handed_on(values)
        return values

    def handed_on(self, x: mx.array) -> mx.array:
        """Start sending this rank's output to the next rank."""
        if not self.by_sums:
            return _begun(mx.distributed.send(x, self.rank + 1, group=self.group, stream=self.stream))
        sent = _begun(mx.distributed.all_sum(x, group=self.group, stream=self.stream))
        for _ in range(self.rank + 1, self.size - 1):  # from each of the others to the one after it
            _begun(mx.distributed.all_sum(mx.zeros(x.shape, x.dtype), group=self.group, stream=self.stream))
        return sent

    def received(self, like: mx.array) -> mx.array:
        """Output of the previous rank, with the shape and dtype of `like`."""
        if not self.by_sums:
            return _awaited(
                mx.distributed.recv(like.shape, like.dtype, self.rank - 1, group=self.group, stream=self.stream)
            )
        x = like
        for _ in range(self.rank):
            x = _begun(mx.distributed.all_sum(mx.zeros(like.shape, like.dtype), group=self.group, stream=self.stream))
        return x

    def from_last(self, x: mx.array) -> mx.array:
        """The last rank's values, on all of them; of a decode step at once, else once they are read."""
        last, is_step = self.size - 1, x.shape[1] == 1  # of a decode step all is wanted, soon
        if not self.overlaps:
            if self.rank != last:
                x = mx.zeros(x.shape, x.dtype)
            elif is_step:
                _begun(x)
            return mx.distributed.all_sum(x, group=self.group, stream=self.stream)
        # To rank 0, which draws, by the link that closes the ring; to the others from rank to rank against the way of
        # all else. So nothing else is on these links in this direction, and it has a stream of its own: where hidden
        # states wait for a rank that computes, what it has made passes them.
        if self.rank == last:
            for rank in sorted({0, last - 1}):
                x = self._also_at(rank, x)
        else:
            before = last if self.rank == 0 else self.rank + 1
            x = mx.distributed.recv(x.shape, x.dtype, before, group=self.group, stream=self.back)
            x = self._also_at(self.rank - 1, x) if self.rank > 1 else x
        return _awaited(x) if is_step else x

    def _also_at(self, rank: int, x: mx.array) -> mx.array:
        """These values; reading them here sends them there, too."""
        sent = mx.distributed.send(x, rank, group=self.group, stream=self.back)
        both: mx.array = mx.depends(x, sent)
        return both

    def least(self, value: int) -> int:
        """The smallest of all ranks' values, which is agreed on at start."""
        _let_come()
        least = mx.distributed.all_min(mx.array([value], mx.int64), group=self.group, stream=self.stream)
        return int(cast(int, least.item()))

    def largest(self, value: int) -> int:
        """The largest of all ranks' values."""
        return -self.least(-value)

    def most(self, value: float) -> float:
        """The largest of all ranks' values; infinity counts."""
        _let_come()
        most = mx.distributed.all_max(mx.array([value], mx.float32), group=self.group, stream=self.stream)
        return cast(float, most.item())


def ranks_of(group: Any | None) -> Ranks | None:
    """Ranks of an MLX group; None for a single rank."""
    _let_come()  # what an engine before this one has left
    return None if group is None or group.size() == 1 else Ranks(group)


def one_after_another(ranks: Ranks) -> Ranks:
    """Ranks that hold a model layer by layer."""
    if not has_sends():
        return replace(ranks, by_sums=True)
    if not computes_on_cpu():
        return ranks
    return replace(ranks, stream=mx.new_stream(mx.cpu), back=mx.new_stream(mx.cpu))


def has_sends() -> bool:
    """True if MLX can send between ranks on this device: its CUDA back end has sums and no sends (0.32)."""
    return on_cpu() or not on_cuda()


def _let_come() -> None:
    """Wait for what is under way: collectives take the same links."""
    mx.eval(list(_COMING))
    _COMING.clear()


def _awaited(x: mx.array) -> mx.array:
    """Under way, and held until it has come: MLX frees what is not referenced, though a stream is yet to write it."""
    _COMING.append(_begun(x))
    if len(_COMING) > _HELD:
        mx.eval(_COMING.popleft())  # here long since
    return x


def _begun(x: mx.array) -> mx.array:
    """Under way, so that ranks exchange in the order of their calls, whatever each asks to have computed."""
    mx.async_eval(x)  # type: ignore[no-untyped-call]
    return x
