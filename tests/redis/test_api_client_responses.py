"""/v1/responses as other clients send it: vLLM's sampling, truncation, log-probabilities, a part of the tools."""

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response

from api.batches.lines import BatchLine, answer, named_by, planned
from api.batches.shapes import shape_of
from api.generation.target import find_target
from api.openai.chat import UNUSED_HEADER
from shared.frames import TokenLogprob
from shared.jobs import JobInput
from shared.sequences import SequenceSpec
from shared.trajectories import Trajectory
from tests.redis.api_servers import Api
from tests.redis.scripted_worker import CARD, MODEL, Answer, ScriptedWorker
from tests.unit.api_texts import codec, ids
from tests.waiting import wait_until

LOGPROBS = ["message.output_text.logprobs"]


def script(spec: SequenceSpec) -> Answer:
    return Answer("held back", hold_at=2) if "hold" in codec().decode(spec.prompt_ids) else Answer("hello")


async def respond(server: Api, **body: Any) -> dict[str, Any]:
    response = await server.post("/v1/responses", {"input": "hi", **body})
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    found: dict[str, Any] = response.json()
    return found


async def test_sampling_as_vllm_has_it_reaches_the_worker(server: Api, worker: ScriptedWorker) -> None:
    await respond(
        server, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.1, stop="x",
        logit_bias={"5": 2}, stop_token_ids=[7], bad_words=["no"], seed=3, truncate_prompt_tokens=4,
    )  # fmt: skip
    s = worker.specs[-1].sampling
    assert (s.top_k, s.min_p, s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (5, 0.1, 1, 0.5, 1.1)
    assert (s.stop, s.logit_bias, s.stop_token_ids) == (("x",), {5: 2.0}, (7,))
    assert s.bad_words[0] == tuple(ids("no"))
    assert len(worker.specs[-1].prompt_ids) == 4
    for wrong in ({"top_k": -5}, {"min_p": 2}, {"stop": [""]}, {"logit_bias": {"x": 1}}, {"priority": 1}):
        refused = (await server.post("/v1/responses", {"input": "hi", **wrong})).json()["error"]
        assert refused["param"] == next(iter(wrong)), refused


async def test_what_asks_for_nothing_here_is_taken_and_told(server: Api) -> None:
    found = await respond(server, max_tool_calls=3, truncation="disabled", include=["reasoning.encrypted_content"])
    assert (found["max_tool_calls"], found["truncation"]) == (3, "disabled")
    response = await server.post("/v1/responses", {"input": "hi", "text": {"verbosity": "low"}})
    assert response.headers[UNUSED_HEADER] == "text.verbosity"
    assert response.json()["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (
        UNUSED_HEADER
        not in (await server.post("/v1/responses", {"input": "x", "text": {"verbosity": "medium"}})).headers
    )


async def test_log_probabilities_come_with_the_text(server: Api) -> None:
    found = await respond(server, include=LOGPROBS, top_logprobs=1)
    (part,) = found["output"][0]["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"] == "hello"
    shown = {"token": "h", "logprob": -0.25, "bytes": [104]}
    assert part["logprobs"][0] == {**shown, "top_logprobs": [shown]}
    assert found["top_logprobs"] == 1
    body = {"input": "hi", "include": LOGPROBS}
    async with server.stream("/v1/responses", body) as events:
        seen = await events.all()
    deltas = [event for event in seen if event["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in event["logprobs"]] for event in deltas] == [list(e["delta"]) for e in deltas]
    (done,) = [event for event in seen if event["type"] == "response.output_text.done"]
    assert [each["token"] for each in done["logprobs"]] == list("hello")
    refused = (await server.post("/v1/responses", {"input": "hi", "top_logprobs": 2})).json()["error"]
    assert refused["param"] == "top_logprobs"


def turns(count: int) -> list[dict[str, Any]]:
    pairs = [[("user", f"question {at:02d}"), ("assistant", f"answer {at:02d}")] for at in range(count)]
    return [{"role": role, "content": text} for pair in pairs for role, text in pair] + [
        {"role": "user", "content": "last"}
    ]


@pytest.mark.parametrize("count", [1, 4, 9, 40])
async def test_truncation_drops_the_oldest_turns_and_no_more_of_them(
    server: Api, worker: ScriptedWorker, count: int
) -> None:
    body = {"input": turns(count), "instructions": "be kind", "max_output_tokens": 20}
    found = await respond(server, **body, truncation="auto")
    assert found["truncation"] == "auto"
    prompt = codec().decode(worker.specs[-1].prompt_ids)
    assert prompt.startswith("system: be kind\n") and prompt.endswith("user: last\n")
    room = CARD.context_length - 20 - len("system: be kind\nuser: last\n")
    kept = min(count, room // len("user: question 00\nassistant: answer 00\n"))
    assert prompt.count("question") == prompt.count("answer") == kept
    if kept:
        assert f"question {count - kept:02d}" in prompt
    whole = await server.post("/v1/responses", body)
    assert whole.status_code == (200 if kept == count else 400)


async def test_truncation_knows_how_much_the_memory_of_a_worker_holds(server: Api, worker: ScriptedWorker) -> None:
    worker.kv_limit_bytes = 90 * CARD.kv_bytes_per_token
    await worker.join()

    async def seen() -> bool:
        (model,) = (await server.http.get("/v1/models")).json()["data"]
        return bool(model["context_length"] == 90)

    await wait_until(seen)
    await respond(server, input=turns(9), instructions="be kind", max_output_tokens=20, truncation="auto")
    prompt = codec().decode(worker.specs[-1].prompt_ids)
    assert prompt.count("question") == (90 - 20 - len("system: be kind\nuser: last\n")) // len(
        "user: question 00\nassistant: answer 00\n"
    )


async def test_an_input_whose_last_turn_does_not_fit_is_refused(server: Api) -> None:
    body = {"input": [*turns(3), {"role": "user", "content": "x" * 300}], "truncation": "auto"}
    refused = (await server.post("/v1/responses", body)).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")


async def test_a_response_goes_by_the_name_that_its_request_gives_it(server: Api) -> None:
    assert (await respond(server, request_id="mine"))["id"] == "resp_mine"
    async with server.stream("/v1/responses", {"input": "hold", "request_id": "held"}) as events:
        first = await events.next()
        assert first is not None and first["response"]["id"] == "resp_held"
        aborted = (await server.post("/abort_requests", {"request_ids": ["resp_held"]})).json()
        assert aborted["aborted"] == ["resp_held"]
        assert (await events.all())[-1]["type"] == "response.failed"
    async with server.stream("/v1/responses", {"input": "hold"}) as events:
        first = await events.next()
        assert first is not None
        name = first["response"]["id"]
        assert (await server.post("/abort_requests", {"request_ids": [name]})).json()["aborted"] == [name]


async def test_allowed_tools_are_taken_in_their_shape(server: Api, worker: ScriptedWorker) -> None:
    tools = [{"type": "function", "name": "a"}, {"type": "function", "name": "b"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "c"}]}
    refused = (await server.post("/v1/responses", {"input": "x", "tools": tools, "tool_choice": choice})).json()
    assert refused["error"]["param"] == "tool_choice" and "'c'" in refused["error"]["message"]
    wrong = choice | {"mode": "required", "tools": [{"type": "mcp", "name": "c"}]}
    refused = (await server.post("/v1/responses", {"input": "x", "tools": tools, "tool_choice": wrong})).json()
    assert "mcp" in refused["error"]["message"]


async def test_a_line_of_a_batch_is_answered_as_a_request_is(server: Api, worker: ScriptedWorker) -> None:
    body = {"input": "hi", "instructions": "be kind", "include": LOGPROBS, "max_output_tokens": 9, "request_id": "r"}
    asked = await respond(server, **body)
    target = await find_target(server.ring, None, session="")
    line = BatchLine("mine", "/v1/responses", body)
    named = named_by(line)
    (planned_input,) = await planned(server.ring, line, named, target, server.ring.images.keep)
    stored = msgspec.json.decode(msgspec.json.encode(planned_input), type=JobInput)
    assert stored.request is not None and stored.prompt == list(worker.specs[-1].prompt_ids)
    tokens = tuple(Answer("hello").tokens)
    tops = tuple((TokenLogprob(token, -0.25),) for token in tokens)
    prompt = worker.specs[-1].prompt_ids
    done = Trajectory(0, 0, prompt, tokens, "", (-0.25,) * len(tokens), "stop", top_logprobs=tops, cached_tokens=3)
    written = answer(shape_of(line.url), "b-0", stored, [msgspec.json.encode(done)], "succeeded", codec(), MODEL)
    told = json.loads(written.line)["response"]["body"]
    assert told.pop("usage")["input_tokens_details"]["cached_tokens"] == 3
    for fresh in ("created_at", "usage"):
        asked.pop(fresh)
    told.pop("created_at")
    for each in (told, asked):
        each["output"][0].pop("id")
    shown = asked["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in shown] == list("hello")
    for each in told["output"][0]["content"][0]["logprobs"]:
        each["top_logprobs"] = []
    assert told == asked
    assert written.usage.input_tokens == len(prompt) and written.usage.output_tokens == len(tokens)
    streamed = BatchLine("s", "/v1/responses", {**body, "stream": True})
    (refused,) = await planned(server.ring, streamed, named, target, server.ring.images.keep)
    assert refused.reply["error"]["error"]["param"] == "stream"
