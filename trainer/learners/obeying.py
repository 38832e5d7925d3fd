"""What is asked of a run's learner, done by one: in the training service, and on the other ranks of a group."""

from shared.errors import ConflictError
from trainer.learn.compute import Work
from trainer.learn.learner import Learner, Trained
from trainer.learn.packing import unpack
from trainer.learners.asks import Accept, Gaps, Parity, Put, Restore, Revert, Train
from trainer.state import Arrays, Snapshot

Deed = Train | Accept | Revert | Parity | Gaps | Put | Restore


def obeyed(learner: Learner, asked: Deed) -> Work[Trained | float | list[float] | None]:
    """Do it; ConflictError or ValueError when what is given is another adapter's."""
    match asked:
        case Train():
            return (yield from learner.train(asked.groups, asked.step, asked.policy_step, asked.probes))
        case Parity():
            return (yield from learner.parity(asked.trajectories))
        case Gaps():
            return (yield from learner.gaps(asked.groups, weights_of(asked.weights)))
        case Accept():
            learner.accept()
        case Revert():
            learner.revert()
        case Restore():
            learner.restore(snapshot_of(asked.snapshot, learner.config()))
        case Put():
            _put(learner, asked)
    return None


def snapshot_of(data: bytes, config: bytes) -> Snapshot:
    """A checkpoint's part out of what `Get` has given."""
    groups = unpack(data, "adapter", "optimizer")
    return Snapshot(groups["adapter"], config, groups["optimizer"])


def weights_of(data: bytes | None) -> Arrays | None:
    """Out of `pack`."""
    return None if data is None else unpack(data, "weights")["weights"]


def _put(learner: Learner, asked: Put) -> None:
    weights = weights_of(asked.weights)
    if asked.what == "best":
        learner.anchor(weights)
    elif weights is None:
        raise ConflictError(f"no weights are given as the {asked.what} ones")
    elif asked.what == "origin":
        learner.begin_with(weights)
    else:
        learner.load(weights)
