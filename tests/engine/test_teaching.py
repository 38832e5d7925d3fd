"""A teacher scores what the policy has said, token by token, when it has said it; a policy may be its own teacher."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_model.loader import LoadedModel
from shared.errors import ServiceUnavailableError, SetupError
from shared.process.settings import load
from shared.trajectories import Reward, Trajectory
from tests.engine.conftest import Bench
from tests.engine.test_trainer_optimize import OPTIONS, finish
from trainer.learn.advantages import taught_advantages
from trainer.learn.batches import Sample, SampleGroup, pad, sample_groups
from trainer.learn.logprobs import shared_scores, to_arrays
from trainer.learn.losses import LOSSES, LossInputs, StepTotals
from trainer.learn.optimize import Optimizer
from trainer.learn.options import AdapterShape, LossOptions, TeachingOptions
from trainer.learn.policy import Policy
from trainer.rollouts.conversation import Opening
from trainer.rollouts.environments import Observation, hinted
from trainer.rollouts.groups import RolloutGroup, TeacherRequest
from trainer.rollouts.teaching import Teaching
from trainer.settings import TrainSettings

PROMPT = (5, 6, 7)


def said(*ids: int, logprobs: tuple[float, ...] = (), taught: tuple[float, ...] = ()) -> Trajectory:
    logprobs = logprobs or (-1.0,) * len(ids)
    return Trajectory(0, 0, PROMPT, ids, "", logprobs, "stop", reward=Reward("r", 1.0), teacher_logprobs=taught)


def test_the_expected_gradient_is_that_of_the_reverse_kl(llama: LoadedModel) -> None:
    """All 320 answers of one token, each counted as often as the policy draws it, against KL(pi || teacher) itself."""
    policy = Policy(llama.model, AdapterShape(rank=2), seed=1)
    policy.load({name: value + 0.02 for name, value in policy.weights().items()})
    vocab = 320
    teacher_V = np.random.default_rng(0).normal(size=vocab).astype(np.float32)
    teacher_V -= np.log(np.exp(teacher_V).sum())
    blank = [Sample((token,), (0.0,), (True,), (0,), 0.0) for token in range(vocab)]
    mu_V = np.array(shared_scores(policy.model, to_arrays(pad([SampleGroup("", PROMPT, tuple(blank))]))).logp_BT)[:, 0]
    advantage_V1 = taught_advantages(np.zeros(vocab, np.float32), (teacher_V - mu_V)[:, None], TeachingOptions())
    batch = pad([SampleGroup("", PROMPT, tuple(blank))])
    arrays, chance_V1 = to_arrays(batch), mx.array(np.exp(mu_V)[:, None])

    def loss(model: Any) -> mx.array:
        logp_BT = shared_scores(model, arrays).logp_BT
        old_BT, weight_BT = mx.array(mu_V[:, None]), chance_V1
        inputs = LossInputs(logp_BT, old_BT, arrays.mask_BT, arrays.advantage_B, weight_BT, mx.array(advantage_V1))
        return LOSSES["dapo"](inputs, LossOptions(dual_clip=0), StepTotals(vocab, 1, 1)).loss

    def divergence(model: Any) -> mx.array:
        logits_V = model(mx.array([PROMPT]))[0, -1].astype(mx.float32)
        logp_V = logits_V - mx.logsumexp(logits_V)
        return (mx.exp(logp_V) * (logp_V - mx.array(teacher_V))).sum()

    found, wanted = (
        dict(
            tree_flatten(
                mx.grad(lambda weights, of=of: of(_with(policy, weights)))(policy.model.trainable_parameters())
            )
        )
        for of in (loss, divergence)
    )
    assert max(np.abs(np.array(value)).max() for value in wanted.values()) > 1e-3
    for name, value in wanted.items():
        assert np.allclose(found[name], value, atol=1e-5), name


def _with(policy: Policy, weights: Any) -> Any:
    policy.model.update(weights)
    return policy.model


def test_rewards_and_the_teacher_are_added_by_their_coefficients(llama: LoadedModel) -> None:
    group = [said(1, 2, taught=(-0.5, -3.0)), replace_reward(said(3, taught=(-2.0,)), 0.0), said(4, logprobs=(-4.0,))]
    (kept,), dropped = sample_groups([RolloutGroup("g", 0, tuple(group))], {})
    batch = pad([kept])
    optimizer = Optimizer(
        Policy(llama.model, AdapterShape(rank=2)), replace(OPTIONS, teaching=TeachingOptions(0.5, 2.0))
    )
    (prepared,) = optimizer.each_prepared([kept], 0)
    found_BT = np.array(prepared.advantage_BT)
    wanted = {(0, 0): 2 / 3 + 0.25, (0, 1): 2 / 3 - 1.0, (1, 0): -4 / 3 - 0.5, (2, 0): 2 / 3}
    assert dropped.zero_variance == 0 and batch.teacher_BT is not None
    assert all(abs(found_BT[at] - value) < 1e-5 for at, value in wanted.items())


def replace_reward(trajectory: Trajectory, value: float) -> Trajectory:
    return Trajectory(
        0, 1, PROMPT, trajectory.completion_ids, "", trajectory.logprobs, "stop", reward=Reward("r", value),
        teacher_logprobs=trajectory.teacher_logprobs,
    )  # fmt: skip


def test_groups_of_equal_rewards_are_learned_from_where_a_teacher_has_scored_them(llama: LoadedModel) -> None:
    equal = [said(1, 2, taught=(-0.5, -3.0)), said(3, taught=(-2.0,))]
    alone = [said(1, 2)], [said(1, 2, taught=(-0.5, -3.0))]
    kept, dropped = sample_groups([RolloutGroup("g", 0, tuple(each)) for each in (equal, *alone)], {})
    assert (len(kept), dropped.too_few) == (2, 1)
    policy = Policy(llama.model, AdapterShape(rank=2))
    assert finish(Optimizer(policy, OPTIONS).train_step(kept, 1)).updated


class Asked:
    """Encodes a prompt as its length, and scores everything alike."""

    def __init__(self, failing: bool = False) -> None:
        self.requests: list[TeacherRequest] = []
        self._failing = failing

    async def opening(self, observation: Observation) -> Opening:
        return Opening(tuple(range(len(str(observation.prompt)))))

    async def score(self, request: TeacherRequest) -> tuple[float, ...]:
        if self._failing:
            raise ServiceUnavailableError("nobody serves it")
        self.requests.append(request)
        return (-0.25,) * len(request.completion_ids)


async def test_a_teacher_reads_the_hint_and_a_policy_is_its_own_teacher_by_it() -> None:
    asked: Any = Asked()
    observation = Observation(({"role": "user", "content": "12+35="},), hint="The answer is 47.")
    shown = hinted(observation).prompt
    assert shown == ({"role": "user", "content": "12+35=\n\nThe answer is 47."},)
    own = await Teaching(asked, asked, "self").of("run-0", "policy@3", observation, said(4, 7))
    other = await Teaching(asked, asked, "big").of("run-0", "policy@3", replace(observation, hint=""), said(4, 7))
    assert own.teacher_logprobs == other.teacher_logprobs == (-0.25, -0.25)
    assert [(each.teacher, len(each.prompt_ids)) for each in asked.requests] == [
        ("policy@3", len(str(shown))),
        ("big", len(PROMPT)),
    ]
    without = await Teaching(asked, asked, "self").of("run-0", "policy@3", replace(observation, hint=""), said(4))
    lost = await Teaching(Asked(failing=True), asked, "big").of("run-0", "", observation, said(4))
    assert "has no hint" in without.error and "nobody serves it" in lost.error
    with pytest.raises(SetupError, match="follows the text of a user's message"):
        hinted(Observation(({"role": "system", "content": "x"},), hint="h"))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--teacher-coefficient", "2"], "goes with a --teacher"),
        (["--teacher", "big", "--loss", "gspo"], "gives each token an advantage"),
        (["--teacher", "self", "--temperature", "0.5"], "leave temperature 1"),
        (["--teacher", "self", "--source", "live"], "run's own prompts"),
    ],
)
def test_settings_that_a_teacher_does_not_go_with_are_refused(flags: list[str], why: str) -> None:
    with pytest.raises(SetupError, match=why):
        load(TrainSettings, flags).check()


def test_an_engine_scores_what_it_has_said_as_it_has_drawn_it(llama: LoadedModel) -> None:
    """The teacher's numbers are of kind `score`: those of the sampler, where both are one."""
    from tests.engine.conftest import spec

    bench = Bench(llama)
    bench.submit(spec("s", [1, 2, 3], max_tokens=4))
    bench.run()
    ids = tuple(bench.tokens("s"))
    bench.submit(replace_spec(spec("t", [1, 2, 3], max_tokens=1), ids))
    bench.run()
    assert np.allclose(bench.events["t"][-1].score_logprobs, bench.logprobs("s"), atol=1e-5)


def replace_spec(made: Any, ids: tuple[int, ...]) -> Any:
    import msgspec

    return msgspec.structs.replace(made, kind="score", score_ids=ids)
