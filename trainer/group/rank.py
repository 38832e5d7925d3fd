"""What the other ranks have of a learner: one like rank 0's, which does what rank 0 does, unit by unit."""

import mlx.core as mx
import msgspec
from mlx_lm.generate import generation_stream

from trainer.datasets.learner import DataLearner
from trainer.datasets.led import Begin, GoOn, done_at_once
from trainer.distilling.learner import DistillLearner
from trainer.distilling.led import Compare, Distill, MakeDistiller, distilled, made_distiller
from trainer.heads.learner import HeadLearner
from trainer.heads.led import Judge, Learn, MakeHead, Read, head_done, made_head
from trainer.learn.compute import Work, at_once
from trainer.learn.learner import Learner
from trainer.learners.asks import Accept, Gaps, Parity, Put, Restore, Revert, Train
from trainer.learners.loop_learner import build_learner
from trainer.learners.obeying import obeyed
from trainer.ranks.learner import Make
from trainer.ranks.work import told
from trainer.tuning.learner import TuneLearner
from trainer.tuning.led import MakeTuner, Measure, Tune, done, made
from worker.engine.model.loader import LoadedModel

Ask = (
    Make | MakeTuner | MakeDistiller | MakeHead | Train | Tune | Distill | Learn | Measure | Compare | Judge | Read
    | Accept | Revert | Parity | Gaps | Put | Begin | Restore | GoOn
)  # fmt: skip

_ask: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)


class RankLearner:
    """Belongs to the thread that loaded the model (worker/guest.py: `GuestRank`)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._learner: Learner | TuneLearner | HeadLearner | None = None
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
        match asked, self._learner:
            case Make() | MakeTuner() | MakeDistiller() | MakeHead(), _:
                return at_once(lambda: self._make(asked))()
            case (Begin() | GoOn() | Accept() | Revert()) as short, DataLearner() as learner:
                return done_at_once(learner, short)
            case Distill() | Compare(), DistillLearner() as learner:
                return distilled(learner, asked)
            case Tune() | Measure() | Parity(), TuneLearner() as learner:
                return done(learner, asked)
            case Learn() | Judge() | Read(), HeadLearner() as learner:
                return head_done(learner, asked)
            case Train() | Gaps() | Put() | Restore() | Accept() | Revert() | Parity(), Learner() as learner:
                return obeyed(learner, asked)
        raise AssertionError("rank 0 has such a learner")

    def _make(self, asked: Make | MakeTuner | MakeDistiller | MakeHead) -> None:
        self._learner = None  # let go of its arrays first
        model, whole = self._loaded.model, self._loaded.whole
        match asked:
            case Make():
                self._learner = build_learner(model, asked.options, whole=whole)
            case MakeTuner():
                self._learner = made(model, asked, whole)
            case MakeDistiller():
                self._learner = made_distiller(model, asked, whole)
            case MakeHead():
                self._learner = made_head(model, asked, whole)
