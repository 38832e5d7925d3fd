"""Answers of a batch's lines: what is counted of them, and plans that an older version has stored."""

import json

import msgspec
import pytest

from api.batches.lines import answer
from api.batches.shapes import shape_of
from api.generation.choice import RequestPlan, stored_plan
from api.generation.sequences import Sequences
from shared.jobs import JobInput, LineRequest
from shared.sequences import SamplingParams, SequenceSpec
from shared.text.languages.pieces import SplitPlan
from shared.trajectories import Trajectory
from tests.unit.api_texts import codec, ids


@pytest.mark.parametrize("shown", [True, False])
def test_a_batch_counts_tokens_of_reasoning_as_its_answers_do(shown: bool) -> None:
    split = SplitPlan(thinking="may", think_start="<think>", think_end="</think>", show_thinking=shown)
    sequences = Sequences(SequenceSpec("chatcmpl-1", "m", (), SamplingParams(99, seed=1)), (), chat=True)
    plan = RequestPlan(sequences, 7, "m", "fp", split=split)
    reply = {"custom_id": "a", "plan": msgspec.to_builtins(plan)}
    asked = JobInput((1,), request=LineRequest(SamplingParams(99, seed=1)), reply=reply)
    thought = ids("<think>so so</think>")
    said = (*thought, *ids("hello"))
    stored = msgspec.json.encode(Trajectory(0, 0, (1,), said, "", (-1.0,) * len(said), "length"))
    got = answer(shape_of("/v1/chat/completions"), "batch-1", asked, [stored], "completed", codec(), "m")
    told = json.loads(got.line)["response"]["body"]["usage"]
    assert got.usage.reasoning_tokens == told["completion_tokens_details"]["reasoning_tokens"] == len(thought)
    assert got.usage.output_tokens == told["completion_tokens"] == len(said)


def test_a_plan_that_an_older_version_has_stored_is_read() -> None:
    older = {
        "id": "cmpl-1", "endpoint": "completions", "created": 7, "served": "m", "model": "alias", "fingerprint": "fp",
        "prompts": [[1, 2], [3]], "n": 2, "deadline_ms": 9, "scores_only": True, "name": "mine", "logprobs": 0,
    }  # fmt: skip
    plan = stored_plan(older)
    sequences = plan.sequences
    assert sequences.ids == ["cmpl-1-0", "cmpl-1-1", "cmpl-1-2", "cmpl-1-3"]
    assert [sequences.prompt_of(index) for index in range(4)] == [(1, 2), (1, 2), (3,), (3,)]
    assert (sequences.template.model, sequences.template.deadline_ms, sequences.scores_only) == ("m", 9, True)
    assert (plan.shown_id, plan.model, plan.logprobs, sequences.chat) == ("cmpl-mine", "alias", 0, False)


def test_a_stored_plan_has_nothing_that_only_workers_read() -> None:
    template = SequenceSpec("cmpl-1", "m", (), SamplingParams(99, seed=1, grammar="g" * 999), prediction_ids=(1,) * 999)
    stored = msgspec.json.encode(RequestPlan(Sequences(template, ((1,),), 2), 7, "m", "fp", echo=("a",)).for_storage())
    assert len(stored) < 400
    plan = stored_plan(msgspec.json.decode(stored))
    assert (plan.sequences.ids, plan.echo, plan.sequences.n) == (["cmpl-1-0", "cmpl-1-1"], ("a",), 2)
