"""What /v1/training/update refuses, and that it names the trajectory and the field."""

from typing import Any

import pytest
from pydantic import ValidationError

from api.http.errors import from_validation
from api.training.body import PostedTrajectory, ReadingContext, UpdateBody, checked, versions_named
from shared.errors import InvalidRequestError
from shared.frames import VersionSpan
from shared.trajectories import Drawing, Trajectory

KNOWN = ReadingContext(policy="policy", model="t", vocabulary=100, context=8)
ONE: dict[str, Any] = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1.0, -0.5], "reward": 1}


def refusal(*trajectories: dict[str, Any], **more: Any) -> InvalidRequestError:
    with pytest.raises((ValidationError, InvalidRequestError)) as caught:
        checked(UpdateBody.model_validate({"trajectories": list(trajectories), **more}), KNOWN)
    error = caught.value
    return from_validation(error.errors()) if isinstance(error, ValidationError) else error


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logprobs": [-1.0]}, "logprobs"),
        ({"logprobs": [-1.0, 0.5]}, "logprobs"),
        ({"logprobs": [-1.0, float("nan")]}, "logprobs[1]"),
        ({"logprobs": [-1.0, float("-inf")]}, "logprobs[1]"),
        ({"reward": float("inf")}, "reward"),
        ({"reward": None}, "reward"),
        ({"reward": {"name": "exact", "value": None, "error": "timed out"}}, "reward"),
        ({"advantage": float("nan")}, "advantage"),
        ({"advantage": -1e300}, "advantage"),
        ({"reward": {"name": "exact", "value": 1e300}}, "reward"),
        ({"loss_mask": [1]}, "loss_mask"),
        ({"loss_mask": [0, 0]}, "loss_mask"),
        ({"loss_mask": [1, 2]}, "loss_mask"),
        ({"spans": [["policy@1", 0, 1]]}, "spans"),
        ({"spans": [["policy@1", 1, 2]]}, "spans"),
        ({"weight_versions": [{"version": "policy@1", "start": 0, "end": 3}]}, "weight_versions"),
        ({"completion_ids": []}, "completion_ids"),
        ({"completion_ids": [3, 100]}, "completion_ids"),
        ({"prompt_ids": [1] * 7}, "completion_ids"),
        ({"prompt_ids": [1, -2]}, "prompt_ids[1]"),
        ({"prompt_ids": [1, 2.0]}, "prompt_ids[1]"),
        ({"finish_reason": "cancelled"}, "finish_reason"),
        ({"rewrad": 1}, "rewrad"),
        ({"error": "it failed"}, "error"),
    ],
)
def test_a_bad_trajectory_is_named_by_index_and_field(change: dict[str, Any], field: str) -> None:
    error = refusal(ONE, {**ONE, **change})
    assert error.status == 400
    assert error.param is not None and error.param.startswith(f"trajectories[1].{field}"), error.message


def test_a_group_has_one_prompt_and_advantages_for_all_or_none() -> None:
    error = refusal({**ONE, "group": "g"}, {**ONE, "group": "g", "prompt_ids": [9]})
    assert error.param == "trajectories[1].group" and "trajectories[0]" in error.message
    error = refusal({**ONE, "advantage": 0.5}, ONE)
    assert error.param == "trajectories[1].advantage"


def test_a_result_line_of_a_job_and_a_collected_trajectory_can_be_posted() -> None:
    line = {
        **ONE, "prompt_index": 3, "sample_index": 1, "text": "x", "spans": [["policy@2", 0, 2]], "seed": 5,
        "worker": "w", "attempt": 1, "timings": {}, "reward": {"name": "exact", "value": 0.5, "components": {"a": 1}},
        "id": "cmpl-1-0", "policy": "p", "model": "m", "group_size": 4, "temperature": 0.7, "collected_ms": 7,
        "logprobs_mode": "processed_logprobs", "drawn": {"temperature": 0.7, "top_p": 0.9},
    }  # fmt: skip
    body = UpdateBody.model_validate({"trajectories": [line, {**ONE, "reward": None, "advantage": 2.0}]})
    with pytest.raises(InvalidRequestError):
        checked(body, KNOWN)
    body = UpdateBody.model_validate({"trajectories": [line, {**ONE, "group": "b", "reward": None, "advantage": 2.0}]})
    first, second = checked(body, KNOWN)
    assert first.trajectory.spans == (VersionSpan("policy@2", 0, 2),)
    assert first.trajectory.reward is not None and first.trajectory.reward.value == 0.5
    assert (first.trajectory.logprobs_mode, first.trajectory.drawn) == ("processed_logprobs", Drawing(0.7, top_p=0.9))
    assert (second.trajectory.logprobs_mode, second.trajectory.drawn) == ("raw_logprobs", None)
    assert second.advantage == 2.0 and second.trajectory.spans == (VersionSpan("", 0, 2),)
    assert versions_named(body) == {"policy@2": (0, "spans")}


def test_each_field_that_a_rollout_comes_with_may_be_posted_back() -> None:
    of_batches = {"prompt_logprobs", "prompt_top_logprobs", "embedding"}
    not_learned_from = {"images", "image_token"}  # by this route
    assert set(Trajectory.__struct_fields__) - of_batches - not_learned_from <= set(PostedTrajectory.model_fields)
