"""What the other ranks have of a learner: one like rank 0's, which does what rank 0 does, unit by unit."""

import mlx.core as mx
import msgspec
from mlx_lm.generate import generation_stream

from trainer.distilling.learner import DistillLearner
from trainer.distilling.led import Compare, Distill, MakeDistiller, distilled, made_distiller
from trainer.learn.compute import Work, at_once
from trainer.learn.learner import Learner
from trainer.learners.asks import Accept, Gaps, Parity, Put, Restore, Revert, Train
from trainer.learners.loop_learner import build_learner
from trainer.learners.obeying import obeyed
from trainer.ranks.learner import Make
from trainer.ranks.work import told
from trainer.tuning.learner import TuneLearner
from trainer.tuning.led import Begin, GoOn, MakeTuner, Measure, Tune, done, made
from worker.engine.model.loader import LoadedModel

Ask = (
    Make | MakeTuner | MakeDistiller | Train | Tune | Distill | Measure | Compare | Accept | Revert | Parity | Gaps
    | Put | Begin | Restore | GoOn
)  # fmt: skip

_ask: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)


class RankLearner:
    """Belongs to the thread that loaded the model (worker/guest.py: `GuestRank`)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._learner: Learner | TuneLearner | None = None
        self._work: Work[object] | None = None

    def unit(self, ask: bytes) -> bytes:
        """The next unit of what is under way, or the first one of what is asked; what came of it, once it is done."""
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
        return told(self._learner)

    def _give_up(self) -> None:
        if self._work is not None:
            self._work.close()
            self._work = None

    def _begun(self, asked: Ask) -> Work[object]:
        match asked:
            case Make() | MakeTuner() | MakeDistiller():
                return at_once(lambda: self._make(asked))()
            case Distill() | Compare():
                assert isinstance(self._learner, DistillLearner), "rank 0 has one"
                return distilled(self._learner, asked)
            case Tune() | Measure() | Begin() | GoOn():
                assert isinstance(self._learner, TuneLearner), "rank 0 has one"
                return done(self._learner, asked)
            case Train() | Gaps() | Put() | Restore():
                assert isinstance(self._learner, Learner), "rank 0 has one"
                return obeyed(self._learner, asked)
        if isinstance(self._learner, TuneLearner):
            return done(self._learner, asked)
        assert self._learner is not None, "the first thing that is asked is to have one"
        return obeyed(self._learner, asked)

    def _make(self, asked: Make | MakeTuner | MakeDistiller) -> None:
        self._learner = None  # let go of its arrays first
        model, whole = self._loaded.model, self._loaded.whole
        match asked:
            case Make():
                self._learner = build_learner(model, asked.options, whole=whole)
            case MakeTuner():
                self._learner = made(model, asked, whole)
            case MakeDistiller():
                self._learner = made_distiller(model, asked, whole)
