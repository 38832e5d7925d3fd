"""The body of POST /v1/jobs and the lines of its uploads."""

from typing import Any

import pytest
from pydantic import ValidationError

from api.http.errors import from_validation
from api.jobs.body import JobBody, upload_inputs
from shared.errors import InvalidRequestError, TokenOutOfRangeError
from shared.jobs import JobInput, JobKind, RewardSpec, read_input
from shared.sequences import ModelCard

CARD = ModelCard("m", 32, 100, (2,), "t" * 64, "b" * 64, 8, "float32")
MESSAGES = [{"role": "user", "content": "hi"}]


class File:
    """An upload that arrives in small pieces."""

    def __init__(self, data: bytes, piece: int = 7) -> None:
        self._data, self._piece, self._at = data, piece, 0

    async def read(self, size: int = -1) -> bytes:
        part = self._data[self._at : self._at + self._piece]
        self._at += self._piece
        return part


async def unasked(*_: object) -> JobInput:
    raise AssertionError("there are no images")


async def inputs_of(data: bytes, kind: JobKind = "generate") -> list[JobInput]:
    return [read_input(line) async for line in upload_inputs(File(data), CARD, kind, unasked)]


def body(**fields: Any) -> JobBody:
    return JobBody.model_validate({"kind": "generate", "prompts": ["a"], **fields})


async def test_each_line_is_a_prompt_in_one_of_its_forms() -> None:
    data = (
        b'"a"\n{"prompt": "b", "reference": "r", "metadata": {"x": 1}}\n\n'
        b'{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt_ids": [1, 2], "completion": [3]}'
    )
    assert await inputs_of(data) == [
        JobInput("a"),
        JobInput("b", "r", None, {"x": 1}),
        JobInput(MESSAGES),
        JobInput([1, 2], completion=[3]),
    ]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"{", "truncated"),
        (b"5", "str"),
        (b'{"prompt": "a", "messages": []}', "exactly one"),
        (b'{"reference": "a"}', "exactly one"),
        (b'{"promt": "a"}', "promt"),
        (b'{"prompt": 3}', "prompt"),
        (b'{"prompt_ids": [100]}', "100"),
        (b'{"prompt_ids": [1.5]}', "int"),
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": [1, {"role": "user"}]}', "mixed"),
        (b'{"messages": [{"content": "x"}]}', "role"),
        (b"\xff", ""),
        (b'{"prompt": "a", "reference": ' + b"[" * 5000 + b"]" * 5000 + b"}", "deeper than 64 levels"),
        (b'{"prompt": "a", "metadata": ' + b'{"a":' * 950 + b"1" + b"}" * 950 + b"}", "deeper than 64 levels"),
    ],
)
async def test_a_malformed_line_is_named_by_its_number(line: bytes, word: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await inputs_of(b'"fine"\n\n' + line + b"\n")
    assert "line 3" in caught.value.message
    assert word in caught.value.message


async def test_a_score_job_needs_a_completion_in_every_line() -> None:
    with pytest.raises(InvalidRequestError, match="input line 3: a score job needs `completion`"):
        await inputs_of(b'{"prompt": "a", "completion": "b"}\n\n"a"\n', "score")
    with pytest.raises(InvalidRequestError, match="input line 1: a score job needs `completion`"):
        [line async for line in body(kind="score").inputs(CARD, unasked)]


async def test_blank_lines_are_no_prompts() -> None:
    blank = b" " * 100_000
    assert await inputs_of(b'"a"\n\n' + blank + b'\n"b"') == [JobInput("a"), JobInput("b")]


async def test_a_long_line_is_read_as_a_short_one() -> None:
    long = b'{"prompt": "' + b"a" * 100_000 + b'", "reference": 1}'
    assert [item.reference for item in await inputs_of(b'"fine"\n' + long + b"\n")] == [None, 1]


async def test_prompts_and_what_belongs_to_them_become_inputs() -> None:
    job = body(
        kind="score",
        prompts=["a", MESSAGES, [1, 2]],
        completions=["x", [5], "z"],
        references=["r", None, {"any": 1}],
        metadata=[{"i": 0}, {"i": 1}, {"i": 2}],
    )
    inputs = [read_input(line) async for line in job.inputs(CARD, unasked)]
    assert inputs == [
        JobInput("a", "r", "x", {"i": 0}),
        JobInput(MESSAGES, None, [5], {"i": 1}),
        JobInput([1, 2], {"any": 1}, "z", {"i": 2}),
    ]
    assert job.spec(CARD).metadata == {}


async def test_ids_outside_the_vocabulary_are_refused_with_their_place() -> None:
    with pytest.raises(TokenOutOfRangeError, match=r"prompts\[1\]"):
        [line async for line in body(prompts=["a", [100]]).inputs(CARD, unasked)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"references": ["a", "b"]}, "references"),
        ({"completions": []}, "completions"),
        ({"metadata": [{}, {}]}, "metadata"),
        ({"n": 0}, "n"),
        ({"kind": "train"}, "kind"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 2**64}, "top_k"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"prompt": "x"}, "prompt"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"kind": "score", "has_next_turn": True}, "has_next_turn"),
        ({"reward": {"strict": True}}, "reward.name"),
    ],
)
def test_bad_jobs_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        body(**fields)
    assert from_validation(caught.value.errors()).param == param


def test_lists_beside_an_upload_belong_into_its_lines() -> None:
    with pytest.raises(ValidationError) as caught:
        JobBody.model_validate({"kind": "rollout", "references": ["a"]})
    assert "lines of the file" in from_validation(caught.value.errors()).message


def test_a_reward_may_be_a_name_alone() -> None:
    assert body(reward="gsm8k").spec(CARD).reward == RewardSpec("gsm8k")


def test_reward_options_may_stand_beside_the_name() -> None:
    flat = body(reward={"name": "gsm8k", "strict": True}).spec(CARD).reward
    nested = body(reward={"name": "gsm8k", "options": {"strict": True}}).spec(CARD).reward
    assert flat == nested == RewardSpec("gsm8k", {"strict": True})


def test_sampling_fields_reach_the_job() -> None:
    fields = {"max_tokens": 4, "stop": "x", "logit_bias": {"5": -1}, "top_k": -1, "logprobs": 3, "seed": 7}
    sampling = body(**fields).spec(CARD).sampling
    assert (sampling.max_tokens, sampling.stop, sampling.logit_bias) == (4, ("x",), {5: -1.0})
    assert (sampling.top_k, sampling.top_logprobs, sampling.seed) == (0, 3, 7)
    assert body(logprobs=True).spec(CARD).sampling.top_logprobs is None


def test_a_deadline_becomes_a_time() -> None:
    spec = body(deadline_s=10).spec(CARD)
    assert spec.deadline_ms == spec.created_ms + 10_000


def test_a_job_says_which_logprobs_it_wants_or_the_server_does() -> None:
    asked, silent = body(logprobs_mode="processed_logprobs"), body()
    assert asked.spec(CARD).sampling.logprobs_mode == "processed_logprobs"
    assert silent.spec(CARD, logprobs_mode="processed_logprobs").sampling.logprobs_mode == "processed_logprobs"
    assert silent.spec(CARD).sampling.logprobs_mode == "raw_logprobs"
