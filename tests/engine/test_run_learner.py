"""A run's learner in the training service: what it is asked, and that another process goes on with it to the byte."""

import weakref
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.errors import ConflictError
from tests.engine.test_trainer_optimize import OPTIONS, groups_of
from trainer.learn.compute import finished
from trainer.learn.gate import GateLimits
from trainer.learn.options import AdapterShape, Schedule
from trainer.learn.packing import pack, unpack
from trainer.learn.policy import Policy
from trainer.learners.calls import call_of, signature_of
from trainer.learners.kinds import PolicyOptions, policy_learner
from trainer.learners.policy import PolicyLearner, Trained
from trainer.service.run_learner import RunLearner, read_call

PROBES = ((1, 2, 3, 4), (9, 8, 7))
MADE = PolicyOptions(
    AdapterShape(rank=4), replace(OPTIONS, schedule=Schedule(peak=1e-3), minibatches=2), GateLimits(), seed=3
)


@pytest.fixture
def policy(llama: LoadedModel) -> Policy:
    return Policy(llama.model, AdapterShape(rank=4))


def run_learner(llama: LoadedModel, **changes: Any) -> RunLearner:
    return RunLearner(llama.model, msgspec.msgpack.encode(replace(MADE, **changes)))


def said(learner: RunLearner, method: str, *arguments: Any) -> Any:
    """Through bytes, both ways."""
    call = read_call(msgspec.msgpack.encode(call_of(method, arguments)))
    return signature_of(PolicyLearner, method).result.decode(finished(learner.answer(*call)))


def test_a_train_step_in_a_service_is_that_of_a_learner_of_ones_own(llama: LoadedModel, policy: Policy) -> None:
    own, hired = policy_learner(llama.model, MADE), run_learner(llama)
    for step in range(2):
        groups = tuple(groups_of(policy, step))
        expected: Trained = finished(own.train(groups, step, step, PROBES))
        done = said(hired, "train", groups, step, step, PROBES)
        assert done.weights.keys() == expected.weights.keys()
        assert all((done.weights[name] == value).all() for name, value in expected.weights.items())
        assert done.checks == expected.checks
        assert replace(done.report, seconds=0) == replace(expected.report, seconds=0)
        own.accept()
        said(hired, "accept")
    assert own.state() == hired.state()


@pytest.mark.usefixtures("uncollected")
def test_a_dropped_learner_is_freed_at_once(llama: LoadedModel, policy: Policy) -> None:
    learner = policy_learner(llama.model, MADE)
    finished(learner.train(groups_of(policy, 0), 0, 0, PROBES))
    left = [weakref.ref(each) for each in (learner.policy, learner.policy.model, learner.optimizer.adam)]
    del learner
    assert [each() for each in left] == [None] * 3


@pytest.mark.parametrize("then", ["accept", "revert"])
def test_another_process_goes_on_in_the_midst_of_a_train_step(llama: LoadedModel, policy: Policy, then: str) -> None:
    first, second = run_learner(llama), run_learner(llama, seed=9)
    weights = said(first, "weights")
    said(first, "anchor", weights)
    said(first, "begin_with", weights)
    said(first, "train", groups_of(policy, 0), 0, 0, PROBES)
    second.restore(first.state())
    for learner in (first, second):
        said(learner, then)
        said(learner, "train", groups_of(policy, 1), 1, 1, PROBES)
    assert first.state() == second.state()
    kept = said(first, "snapshot")
    third = run_learner(llama)
    said(third, "restore", kept)
    again = said(third, "snapshot")
    assert again.adapter_config == kept.adapter_config
    for one, other in ((again.adapter, kept.adapter), (again.optimizer, kept.optimizer)):
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_what_is_of_another_adapter_is_refused_and_changes_nothing(llama: LoadedModel) -> None:
    learner = run_learner(llama)
    before = learner.state()
    other = {"x": np.zeros(3, np.float32)}
    for method, *arguments in (
        ("load", other), ("load", None), ("load",), ("anchor", b"1"), ("restore", other), ("gaps", (), b"1"),
        ("load", {"x": np.array(["text"])}), ("resume", b""), ("_policy",), ("__init__",), ("", 1),
    ):  # fmt: skip
        with pytest.raises(ConflictError):
            said(learner, str(method), *arguments)
    assert learner.state() == before
    with pytest.raises(ConflictError, match="cannot be asked"):
        read_call(b"\x81")
    with pytest.raises(ValueError, match="cannot be read"):
        RunLearner(llama.model, b"")


def test_what_is_the_same_is_packed_once() -> None:
    one = {"a": np.arange(1000.0), "count": np.array(3, np.uint64)}
    groups = {"good": one, "present": {name: value.copy() for name, value in one.items()}, "none": {}}
    data = pack(groups)
    assert len(data) < 9000
    found = unpack(data)
    assert found.keys() == groups.keys() and found["none"] == {}
    for name in ("good", "present"):
        assert found[name]["count"].shape == () and (found[name]["a"] == one["a"]).all()


def test_one_that_was_resumed_takes_a_train_step_back_and_learns_on() -> None:
    model = load_model(
        EngineConfig("models/tiny", dtype="float32")
    ).model  # whose tree has lists that are no parameters
    groups = groups_of(Policy(model, AdapterShape(rank=4), seed=1))
    first, second = (policy_learner(model, MADE) for _ in range(2))
    for step in range(2):
        finished(first.train(groups, step, step, PROBES))
        if step == 0:
            first.accept()
    second.resume(first.state())
    for each in (first, second):
        each.revert()
        finished(each.train(groups, 2, 1, PROBES))
    assert all(np.array_equal(second.weights()[name], weights) for name, weights in first.weights().items())
