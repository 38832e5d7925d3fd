"""Routing replay: workers name the experts of each sampled token, and a trainer computes with the same ones."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3_moe

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from mlx_model.routing import UNKNOWN, NotedRoutes, Replay
from shared.errors import UnsupportedModelError
from shared.sequences import SamplingParams, SequenceSpec, Timings
from shared.trajectories import Reward, Trajectory, result_of, trajectory_of
from tests.engine.conftest import Bench
from tests.engine.small_models import QWEN3, write_model
from tests.engine.test_trainer_optimize import OPTIONS, finish
from trainer.learn.batches import SampleGroup, pad, sample_groups
from trainer.learn.logprobs import row_scores, shared_scores, to_arrays
from trainer.learn.optimize import Optimizer
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy
from trainer.rollouts.conversation import joined
from trainer.rollouts.groups import RolloutGroup

MOE: dict[str, Any] = QWEN3 | {
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LAYERS, CHOSEN, LENGTH = 2, 2, 6


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("models") / "moe"
    return load_model(EngineConfig(str(write_model(folder, MOE))))


def sampled(loaded: LoadedModel, prompts: Sequence[tuple[int, ...]], samples: int = 2) -> list[list[Trajectory]]:
    """Samples of each prompt from an engine, beside a row that asks for no routes."""
    bench = Bench(loaded)
    specs = [
        [
            SequenceSpec(
                id=f"{at}-{s}",
                model="m",
                prompt_ids=prompt,
                sampling=SamplingParams(max_tokens=LENGTH, seed=s, ignore_eos=True, return_routed_experts=True),
                group=str(at),
            )
            for s in range(samples)
        ]
        for at, prompt in enumerate(prompts)
    ]
    plain = SequenceSpec(id="plain", model="m", prompt_ids=(9, 8), sampling=SamplingParams(max_tokens=3, seed=5))
    bench.submit(*(spec for group in specs for spec in group), plain)
    bench.run()
    assert all(event.routes is None for event in bench.events["plain"])
    return [
        [
            trajectory_of(spec, result_of(spec, 1, "w", bench.events[spec.id], Timings()), "", s, {}, Reward("r", s))
            for s, spec in enumerate(group)
        ]
        for group in specs
    ]


def groups_of(sampled: list[list[Trajectory]]) -> list[SampleGroup]:
    groups = [RolloutGroup(str(at), at, tuple(each)) for at, each in enumerate(sampled)]
    return sample_groups(groups, {}, mask_overlong=False)[0]


def sets(routes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Experts [.., layers, chosen] in order: a mixture sums over them."""
    return np.sort(routes.reshape(*routes.shape[:-1], LAYERS, CHOSEN), axis=-1)


def test_a_block_that_replays_equals_the_papers_formula() -> None:
    """arXiv 2510.11370: weights over the given experts, by the block's own scores, in plain numpy."""
    mx.random.seed(1)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(MOE))
    replay, block = Replay(model), model.layers[1].mlp
    x_BLH = mx.random.normal((2, 3, 64))
    routes_BLW = np.random.default_rng(0).permuted(np.tile(np.arange(8), (2, 3, 1)), axis=-1)[..., :4].astype(np.int32)
    with replay.of(mx.array(routes_BLW)):
        found_BLH = np.array(block(x_BLH))
    gate, up, down, router = (
        np.array(each.weight, np.float64)
        for each in (block.switch_mlp.gate_proj, block.switch_mlp.up_proj, block.switch_mlp.down_proj, block.gate)
    )
    x = np.array(x_BLH, np.float64)
    for b, t in np.ndindex(2, 3):
        chosen = routes_BLW[b, t, CHOSEN:]  # of the second layer
        scores = np.exp(router[chosen] @ x[b, t])
        wanted = np.zeros(64)
        for expert, weight in zip(chosen, scores / scores.sum(), strict=True):
            inner = gate[expert] @ x[b, t]
            wanted += weight * (down[expert] @ (inner / (1 + np.exp(-inner)) * (up[expert] @ x[b, t])))
        assert np.abs(found_BLH[b, t] - wanted).max() < 1e-5


def test_an_engine_names_the_experts_that_a_forward_of_the_whole_text_chooses(moe: LoadedModel) -> None:
    prompts = [(1, 2, 3, 4, 5), (7, 8)]
    for prompt, trajectories in zip(prompts, sampled(moe, prompts), strict=True):
        for trajectory in trajectories:
            ids = [*prompt, *trajectory.completion_ids]
            noted = NotedRoutes(moe.model)
            mx.eval(moe.model(mx.array([ids])))
            wanted = np.array(noted.take(1, len(ids)))[0, len(prompt) - 1 : -1]
            routes = np.frombuffer(trajectory.routes, np.uint8).reshape(LENGTH, LAYERS * CHOSEN)
            assert np.array_equal(sets(routes), sets(wanted))


def test_a_trainer_that_routes_otherwise_computes_with_the_samplers_experts(moe: LoadedModel) -> None:
    """Its router's weights are off by a little, as other kernels would have it; both ways, and with layers again."""
    groups = groups_of(sampled(moe, [(1, 2, 3, 4, 5), (7, 8)]))
    batch = pad(groups)
    arrays = to_arrays(batch)

    def policy(*, replays: bool, again: bool = False) -> Policy:
        made = Policy(moe.model, AdapterShape(rank=2), checkpoint_layers=again)
        if replays:
            made.replay_routes()
        for layer in made.model.layers:
            router = layer.mlp.gate.linear
            router.weight = router.weight + 0.02 * mx.random.normal(router.weight.shape, key=mx.random.key(3))
        return made

    def mismatch(logp_BT: mx.array) -> float:
        return float(np.abs(np.array(logp_BT) - batch.sampler_BT)[batch.mask_BT].mean())

    plain, replayed, again = policy(replays=False), policy(replays=True), policy(replays=True, again=True)
    shared, rows, layers_again = (
        scores(each.model, arrays).logp_BT
        for scores, each in ((shared_scores, replayed), (row_scores, replayed), (row_scores, again))
    )
    assert np.allclose(*(np.where(batch.mask_BT, each, 0) for each in (shared, rows)), atol=1e-5)
    assert np.allclose(rows, layers_again, atol=1e-6)
    assert mismatch(shared) < mismatch(shared_scores(plain.model, arrays).logp_BT) / 2
    without = replace(arrays, routes_BTN=None)
    own, wanted = (shared_scores(each.model, without).logp_BT for each in (replayed, plain))
    assert np.array_equal(np.array(own), np.array(wanted)), "samples that name no experts are routed by the trainer"

    def gradient(each: Policy) -> dict[str, mx.array]:
        loss = nn.value_and_grad(each.model, lambda model: row_scores(model, arrays).logp_BT.sum())
        return dict(nn.utils.tree_flatten(loss(each.model)[1]))

    one, other = gradient(replayed), gradient(again)
    assert all(np.allclose(one[name], other[name], atol=1e-4) for name in one)
    assert any(mx.any(value != 0).item() for name, value in one.items() if "mlp.gate" in name), "routers learn, too"


def test_a_train_step_replays_and_counts_no_mismatch_of_its_own(moe: LoadedModel) -> None:
    groups = groups_of(sampled(moe, [(1, 2, 3, 4, 5)]))
    policy = Policy(moe.model, AdapterShape(rank=2))
    optimizer = Optimizer(policy, replace(OPTIONS, routing_replay=True, distances_every=1, minibatches=1))
    report = finish(optimizer.train_step(groups, 1))
    assert report.updated and report.distances is not None and report.distances.mismatch_max < 1e-4
    wrong = [replace(group, samples=tuple(replace(s, routes=s.routes * 2) for s in group.samples)) for group in groups]
    with pytest.raises(ValueError, match="8 bytes a token, and this model in 4"):
        finish(optimizer.train_step(wrong, 2))


def test_what_a_tool_says_between_two_turns_has_no_known_experts() -> None:
    first = Trajectory(0, 0, (1,), (2, 3), "", (-1.0, -1.0), "stop", routes=b"abcd")
    second = Trajectory(0, 0, (1, 2, 3, 4), (5,), "", (-1.0,), "stop", routes=b"ef")
    whole = joined(first, [4], second)
    assert whole.routes == b"abcd" + bytes([UNKNOWN] * 2) + b"ef"
    assert joined(first, [4], replace_routes(second)).routes == b""


def replace_routes(trajectory: Trajectory) -> Trajectory:
    return Trajectory(0, 0, trajectory.prompt_ids, trajectory.completion_ids, "", trajectory.logprobs, "stop")


@pytest.mark.parametrize(
    ("family", "own", "why"),
    [
        ("olmoe", {"norm_topk_prob": False}, "weights or chooses its experts in a way"),
        ("glm4_moe", {}, "chooses experts in its router"),
    ],
)
def test_a_family_whose_choice_cannot_be_replayed_is_refused(family: str, own: dict[str, Any], why: str) -> None:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    glm = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    glm |= {"routed_scaling_factor": 1.0, "use_qk_norm": False, "attention_bias": False, "partial_rotary_factor": 1.0}
    glm |= {"rope_scaling": None}
    config = MOE | (glm if family == "glm4_moe" else {}) | own | {"model_type": family}
    with pytest.raises(UnsupportedModelError, match=why):
        Replay(module.Model(module.ModelArgs.from_dict(config)))


def test_a_request_for_experts_of_a_dense_model_ends_with_an_error_and_others_go_on(llama: LoadedModel) -> None:
    bench = Bench(llama)
    asked = SamplingParams(max_tokens=2, seed=0, return_routed_experts=True)
    bench.submit(SequenceSpec(id="asks", model="m", prompt_ids=(1, 2), sampling=asked))
    bench.submit(SequenceSpec(id="plain", model="m", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=2, seed=0)))
    bench.run()
    assert "no mixture of experts" in bench.finish("asks").error_message
    assert bench.finish("plain").reason in ("stop", "length")
