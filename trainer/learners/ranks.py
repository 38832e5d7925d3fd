"""A learner of several ranks: each has one, and all of them carry out what rank 0 is asked, unit by unit.

What a learner does follows from plain data alone, so rank 0 sends the others each call (calls.py) before it carries it
out. Weights and moments are whole on every rank, gradients are sums over ranks (mlx_model/learning.py;
trainer/learn/peers.py where each rank has all of the model). After each call the ranks compare the bits of their
parameters. How ranks meet and are lost is in ranks/.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import msgspec
from mlx_lm.generate import generation_stream

from mlx_model.loader import LoadedModel
from trainer.learn.compute import Others, Work, at_once
from trainer.learners.calls import Call, arguments_of, call_of, called, signature_of
from trainer.learners.kinds import AnyLearner, Made, made

T = TypeVar("T")

_ask: msgspec.msgpack.Decoder[Made | Call] = msgspec.msgpack.Decoder(Made | Call)


class Leading:
    """Rank 0's way to have something done by all ranks; in the thread that computes."""

    def __init__(self, others: Others) -> None:
        self._others = others

    def build(self, made_with: Made, function: Callable[[], AnyLearner]) -> AnyLearner:
        """Build a learner on all ranks, in place of what was there."""
        built: list[AnyLearner] = []
        work = self._together(made_with, at_once(lambda: built.append(function())), lambda: built[0])
        for _ in work:
            raise AssertionError("building has one unit")
        return built[0]

    def called(self, learner: Any, method: str, args: tuple[Any, ...]) -> Work[Any]:
        """Call a method on all ranks; one that only reads, on this one."""
        if signature_of(type(learner), method).reads:
            return called(learner, method, args)
        ask = call_of(method, args)
        return self._together(ask, lambda: called(learner, method, args), lambda: learner)

    def _together(self, ask: Made | Call, start: Callable[[], Work[T]], learner: "Callable[[], AnyLearner]") -> Work[T]:
        """Do what `start` does on all ranks; a call that is given up here is given up by all.

        An error that all ranks have had is raised; one that only some have ends the group (ranks/lead.py).
        """
        body = msgspec.msgpack.encode(ask)
        work: Work[T] | None = None
        try:
            while True:
                self._others.unit(body)
                body = b""
                try:
                    with mx.stream(generation_stream):  # one stream for all sums of a group
                        work = work or start()
                        next(work)
                except StopIteration as end:
                    self._others.united(_digest(learner()))
                    value: T = end.value
                    return value
                except Exception:
                    self._others.failed()
                    raise
                self._others.united(b"")
                yield
        finally:
            if work is not None:
                work.close()


class RankLearner:
    """Another rank's learner; belongs to the thread that loaded the model (worker/guest.py: `GuestRank`)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._learner: AnyLearner | None = None
        self._work: Work[object] | None = None

    def unit(self, ask: bytes) -> bytes:
        """The next unit of the call under way, or the first one of `ask`; a digest when the call ends, else b""."""
        with mx.stream(generation_stream):
            if ask:
                self._give_up()
                self._work = self._begun(_ask.decode(ask))
            assert self._work is not None, "rank 0 asks before it goes on"
            try:
                next(self._work)
                return b""
            except StopIteration:
                self._work = None
            except Exception:
                self._work = None
                raise
        assert self._learner is not None, "the first thing that is asked is to have one"
        return _digest(self._learner)

    def _give_up(self) -> None:
        if self._work is not None:
            self._work.close()
            self._work = None

    def _begun(self, asked: Made | Call) -> Work[object]:
        if isinstance(asked, Made):
            return at_once(lambda: self._make(asked))()
        return called(self._learner, asked.method, arguments_of(type(self._learner), asked))

    def _make(self, asked: Made) -> None:
        self._learner = None  # let go of its arrays first
        self._learner = made(asked, self._loaded.model, whole=self._loaded.whole)


class Alike(Protocol):
    """A learner that is the same on all ranks."""

    def digest(self) -> int:
        """A sum over the bits of its parameters."""


def _digest(learner: Alike) -> bytes:
    with mx.stream(generation_stream):
        return str(learner.digest()).encode()
