"""What a batch counts of an answered line is what the line's own answer tells."""

import json

import msgspec
import pytest

from api.batches.lines import answer
from api.batches.shapes import shape_of
from api.generation.choice import ReplyPlan
from api.generation.languages.pieces import SplitPlan
from shared.jobs import JobInput, LineRequest
from shared.sequences import SamplingParams
from shared.trajectories import Trajectory
from tests.unit.api_texts import codec, ids


@pytest.mark.parametrize("shown", [True, False])
def test_a_batch_counts_tokens_of_reasoning_as_its_answers_do(shown: bool) -> None:
    split = SplitPlan(thinking="may", think_start="<think>", think_end="</think>", show_thinking=shown)
    plan = ReplyPlan("chatcmpl-1", "chat", 7, "m", "m", "fp", (), split=split)
    reply = {"custom_id": "a", "plan": msgspec.to_builtins(plan)}
    asked = JobInput((1,), request=LineRequest(SamplingParams(99, seed=1)), reply=reply)
    thought = ids("<think>so so</think>")
    said = (*thought, *ids("hello"))
    stored = msgspec.json.encode(Trajectory(0, 0, (1,), said, "", (-1.0,) * len(said), "length"))
    got = answer(shape_of("/v1/chat/completions"), "batch-1", asked, [stored], "completed", codec(), "m")
    told = json.loads(got.line)["response"]["body"]["usage"]
    assert got.usage.reasoning_tokens == told["completion_tokens_details"]["reasoning_tokens"] == len(thought)
    assert got.usage.output_tokens == told["completion_tokens"] == len(said)
