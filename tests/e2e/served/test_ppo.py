"""A network that learns to act: a real trainer, over HTTP, on a real ring."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from shared.errors import ConflictError, SetupError
from shared.process.settings import load
from tests.e2e.rings import Ring
from tests.e2e.served.test_heads import upload
from tests.e2e.served.test_predictions import post
from tests.waiting import HANG_S, wait_until
from trainer.learn.compute import ThreadHost
from trainer.learn.ppo_losses import steps_of
from trainer.learn.ppo_network import first_weights, two_layers
from trainer.learners.ppo import PpoLearner
from trainer.ring.http_client import HttpApi
from trainer.rollouts.cart_pole import CartPole
from trainer.runs.acting import Actor, Player
from trainer.runs.ppo import PpoLine, network_of, options_of, train_network
from trainer.settings import TrainSettings
from trainer.state import RunState

SMALL = {
    "task": "cart-pole",
    "environment_copies": "24",
    "rollout_steps": "25",
    "learning_rate": "0.01",
    "evaluate_every": "2",
}


def settings_of(served: Ring, folder: Path, name: str, **changes: Any) -> TrainSettings:
    fields = {"connect_to": served.url, "run_dir": folder, "adapter": name, "evaluate_prompts": 5, **SMALL, **changes}
    flags = [part for field, value in fields.items() for part in (f"--{field.replace('_', '-')}", str(value))]
    return load(TrainSettings, ["--mode", "ppo", *flags])


def learn(settings: TrainSettings) -> RunState:
    async def run() -> RunState:
        settings.check()
        async with ThreadHost() as host:
            return await train_network(settings, host, lambda _: None)

    return asyncio.run(run())


def lines(settings: TrainSettings) -> list[PpoLine]:
    read = (settings.folder / "metrics.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=PpoLine) for line in read]


@pytest.mark.parametrize(
    ("task", "changes"),
    [("cart-pole", {}), ("tests.unit.own_code:Drift", {"memory": "lstm", "bptt_steps": 5, "episode_steps": 20})],
)
def test_each_train_step_serves_a_version_that_acts_otherwise(
    served: Ring, tmp_path: Path, task: str, changes: dict[str, Any]
) -> None:
    name = f"ppo-{task.rpartition(':')[2].lower()}"
    settings = settings_of(served, tmp_path, name, task=task, steps=2, **changes)
    state = learn(settings)
    assert (state.train_step, state.version, state.consumed, state.rejected) == (2, 3, 1200, 0)
    told = lines(settings)
    assert [(line.step, line.version, line.off_policy) for line in told] == [(1, 2, 0), (2, 3, 0)]
    assert [line.evaluated is None for line in told] == [True, False] and told[-1].episodes > 0
    with httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        observed = np.random.default_rng(0).normal(0, 0.1, (20, 2 if "memory" in changes else 4)).tolist()
        shown = "action_means" if "memory" in changes else "action_probs"
        acted = [
            post(http, "/v1/rl/act", model=f"{name}@{version}", observations=observed)[shown] for version in (1, 2, 3)
        ]
        for one, other in ((0, 1), (1, 2)):
            assert np.abs(np.array(acted[one]) - acted[other]).max() > 1e-3, "acting has moved"
        assert post(http, "/v1/rl/act", model=name, observations=observed)["policy_version"] == f"{name}@3"
        manifest = next(each for each in http.get(f"/v1/adapters/{name}").json()["versions"] if each["version"] == 3)
        passed = {check["name"]: check["passed"] for check in manifest["gate"]}
        assert passed == dict.fromkeys(
            ("finite_weights", "finite_gradients", "probe_kl", "base_model", "reload_parity"), True
        )
        status = http.get("/v1/training/status", params={"policy": name}).json()
        assert (status["trainer"]["train_step"], status["trainer"]["source"]) == (2, task), status
        assert manifest["source"] == "trainer"
        shown = http.get("/dashboard/training").text
        trainer = status["trainer"]
    assert (trainer["mode"], trainer["updates"], trainer["latest_checkpoint"]) == ("ppo", 2, "step-000002")
    assert (trainer["reward"], trainer["explained"]) == (told[-1].mean_return, told[-1].explained)
    assert trainer["last_update_ms"] > trainer["started_ms"] > 0 and trainer["updates_per_s"] > 0
    for field in ("loss", "kl", "value_loss"):
        assert trainer[field] == told[-1].learned[field]
    assert f"run {name}, mode ppo, task {task}" in shown


async def test_sequences_are_learned_from_with_what_workers_remembered(served: Ring) -> None:
    """Also where episodes end inside of one, fail or are cut off, and where one rollout goes on with another's."""
    network = two_layers(2, 2, discrete=True, memory="gru")
    weights = {name: 3 * each for name, each in first_weights(network, 5).items()}
    weights["pi.weight"] *= 50
    with httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        assert upload(http, "ppo-gru", weights, {"network": msgspec.to_builtins(network)}).status_code == 200
    settings = load(TrainSettings, ["--mode", "ppo", "--task", "cart-pole-masked", "--memory", "gru"])
    learner = PpoLearner(network, weights, options_of(settings))
    async with HttpApi(served.url) as api:
        carts = CartPole(10, 0, masked=True)
        player = Player(Actor(api, "ppo-gru", network), carts, 0.9, [0], length=8)
        for _ in range(2):
            rollout = await player.play(24)
            steps = steps_of(rollout, np.zeros_like(rollout.values_TN))
            assert steps.observed_BLI.shape == (30, 8, 2) and rollout.ended_TN.any()
            logp, values = learner.policy(weights, steps)
            np.testing.assert_allclose(logp, steps.logp_BL, atol=1e-4)
            np.testing.assert_allclose(values, steps.values_BL, atol=1e-4)
        assert np.ptp(steps.logp_BL) > 0.1 and any(each.any() for each in steps.state.values())


def test_a_run_goes_on_where_it_was_and_ends_where_somebody_else_serves(served: Ring, tmp_path: Path) -> None:
    learn(settings_of(served, tmp_path, "ppo-goes-on", steps=1))
    settings = settings_of(served, tmp_path, "ppo-goes-on", steps=2, learning_rate="0.001")
    assert learn(settings).version == 3 and [line.step for line in lines(settings)] == [1, 2]
    network = network_of(settings)
    with httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        config = {"network": msgspec.to_builtins(network)}
        assert upload(http, "ppo-goes-on", first_weights(network, 9), config).status_code == 200
    with pytest.raises(ConflictError, match="ppo-goes-on@4 is the latest, and not of this run"):
        learn(settings_of(served, tmp_path, "ppo-goes-on", steps=3))


def test_a_run_ends_when_somebody_else_serves_another_version_meanwhile(served: Ring, tmp_path: Path) -> None:
    settings = settings_of(served, tmp_path, "ppo-moved", steps=1000, evaluate_every=0)
    network = network_of(settings)
    with ThreadPoolExecutor(1) as thread, httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        run = thread.submit(learn, settings)
        metrics = settings.folder / "metrics.jsonl"
        asyncio.run(wait_until(lambda: run.done() or (metrics.exists() and metrics.stat().st_size > 0)))
        config = {"network": msgspec.to_builtins(network)}
        assert upload(http, "ppo-moved", first_weights(network, 9), config).status_code == 200
        with pytest.raises(ConflictError, match=r"latest: version [0-9]+ has become the latest meanwhile"):
            run.result(HANG_S)


def test_a_candidate_that_fails_the_gate_is_not_served(served: Ring, tmp_path: Path) -> None:
    settings = settings_of(served, tmp_path, "ppo-leaps", steps=9, max_probe_kl="1e-9", max_rejections=2)
    with pytest.raises(Exception, match="2 candidates in a row failed the gate: probe_kl"):
        learn(settings)
    with httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        assert http.get("/v1/adapters/ppo-leaps").json()["latest"] == 1
        points = http.get("/debug/training", params={"policy": "ppo-leaps"}).json()["points"]
    (line,) = lines(settings)
    assert line.version == 1 and line.gate.startswith("probe_kl: ")
    assert [point["gate"] for point in points] == [line.gate], "the curve says that it was rejected"


def test_a_ring_without_an_api_is_refused(served: Ring, tmp_path: Path) -> None:
    settings = settings_of(served, tmp_path, "ppo-redis", connect_to=served.redis_url)
    with pytest.raises(SetupError, match="--mode ppo acts through an api"):
        learn(settings)
