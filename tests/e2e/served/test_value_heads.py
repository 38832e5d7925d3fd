"""PPO of a language model on a real ring: what it publishes tells what a prompt is worth, also after a kill."""

from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file

from tests.e2e.rings import Ring
from tests.e2e.served.test_heads import reference
from tests.e2e.served.test_predictions import ids, post
from tests.training.kills import check, train
from tests.waiting import HANG_S


def test_a_policy_that_ppo_has_taught_says_what_a_prompt_is_worth(served: Ring, tmp_path: Path) -> None:
    outcome = train(served, tmp_path, "valued", steps=4, max_lag=0, kills=1, loss="ppo")
    check(outcome, 4, on_policy=True)
    assert all(line.value_loss is not None and line.taught == line.groups for line in outcome.lines)
    assert outcome.lines[0].explained == 0 != outcome.lines[-1].explained
    version = outcome.state.version
    name, observed = f"valued@{version}", ["12+34=", "hello"]
    tensors = load_file(tmp_path / "valued" / "versions" / str(version) / "adapters.safetensors")
    with httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        acted = post(http, "/v1/rl/act", model=name, observations=observed, actions=["46", "7"])
        wanted = [float(reference(http, tensors, name, "value", ids(http, text))[0]) for text in observed]
        np.testing.assert_allclose(acted["value_estimates"], wanted, atol=1e-5)
        assert min(map(abs, wanted)) > 0
        assert post(http, "/v1/rl/act", model="tiny", observations=observed)["value_estimates"] is None
        points = http.get("/debug/training", params={"policy": "valued"}).json()["points"]
    assert [point["value_loss"] for point in points] == [line.value_loss for line in outcome.lines]
    assert [point["explained"] for point in points] == [line.explained for line in outcome.lines]
