"""The anthropic package: messages whole and streamed, tools, structured output, betas, counts, models, Message Batches,
files, its errors."""

import os
import time
from typing import Literal

import anthropic
import pydantic

MODEL = "claude-of-the-tests"  # an alias of the served model
URL = os.environ["PARALLM_URL"]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {**CITY, "additionalProperties": False}}


class City(pydantic.BaseModel):
    name: Literal["Rome", "Oslo"]
    rainy: bool


def said(**fields):
    return {"model": MODEL, "max_tokens": 24, "messages": HELLO, "extra_body": {"temperature": 0}, **fields}


def messages() -> None:
    whole = client.messages.create(**said())
    with client.messages.stream(**said()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    count = client.messages.count_tokens(model=MODEL, messages=HELLO)
    assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    stop = whole.content[0].text[3:6]
    stopped = client.messages.create(**said(stop_sequences=[stop]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    again = client.messages.create(
        **said(messages=[*HELLO, {"role": "assistant", "content": whole.content[0].text[:4]}])
    )
    assert again.stop_reason in ("end_turn", "max_tokens")


def tools() -> None:
    fields = said(max_tokens=300, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    (use,) = whole.content
    assert use.type == "tool_use" and whole.stop_reason == streamed.stop_reason == "tool_use"
    assert use.input["city"] in ("Rome", "Oslo") and streamed.content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [*HELLO, whole.to_param(), {"role": "user", "content": [result]}]
    assert client.messages.create(**said(messages=turns, tools=[WEATHER])).usage.output_tokens


def structured() -> None:
    parsed = client.messages.parse(**said(max_tokens=400, output_format=City)).parsed_output
    assert isinstance(parsed, City)


def betas() -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = client.beta.messages.create(
        **said(system=system, metadata={"user_id": "somebody"}, thinking={"type": "adaptive"}),
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert answer.type == "message" and answer.context_management.applied_edits == []


def models() -> None:
    listed = list(client.models.list())
    assert os.environ["PARALLM_MODEL_NAME"] in [model.id for model in listed]  # among names that stand for it
    assert client.models.retrieve(MODEL).id == MODEL


def ended(batches, batch_id: str):
    """A batch once it has ended."""
    until = time.monotonic() + 120
    while (batch := batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < until, batch
        time.sleep(0.2)
    return batch


def batches() -> None:
    for kind in (client.messages.batches, client.beta.messages.batches):
        params = {"model": MODEL, "max_tokens": 24, "messages": HELLO, "temperature": 0}
        wrong = {"custom_id": "wrong", "params": {**params, "container": "c"}}
        made = kind.create(requests=[*({"custom_id": f"r{at}", "params": params} for at in range(20)), wrong])
        assert (made.processing_status, made.request_counts.processing, made.results_url) == ("in_progress", 21, None)
        done = ended(kind, made.id)
        assert (done.request_counts.succeeded, done.request_counts.errored) == (20, 1)
        assert made.created_at == done.created_at <= done.ended_at < done.expires_at
        results = {result.custom_id: result.result for result in kind.results(made.id)}
        assert len(results) == 21
        refused = results.pop("wrong").error.error
        assert refused.type == "invalid_request_error" and "container" in refused.message
        whole = client.messages.create(**said())
        for result in results.values():
            assert [block.to_dict() for block in result.message.content] == [each.to_dict() for each in whole.content]
        many = [{"custom_id": f"r{at}", "params": {**params, "max_tokens": 500}} for at in range(400)]
        stopped = kind.create(requests=many)
        assert kind.cancel(stopped.id).cancel_initiated_at
        counts = ended(kind, stopped.id).request_counts
        assert counts.canceled > 0 and counts.canceled + counts.succeeded == 400, counts
        assert [each.id for each in kind.list(limit=1)][:2] == [stopped.id, made.id]  # two pages
        for batch in (made, stopped):
            assert kind.delete(batch.id).id == batch.id
        try:
            kind.retrieve(made.id)
        except anthropic.NotFoundError as error:
            assert error.body["error"]["type"] == "not_found_error"
        else:
            raise AssertionError("it was deleted")


def files() -> None:
    for kind in (client.files, client.beta.files):
        stored = kind.upload(file=b"\xff bytes without a name", expires_in_seconds=3600)
        named = kind.upload(file=("a.txt", b"text", "text/plain"))
        assert (named.filename, named.mime_type, named.size_bytes) == ("a.txt", "text/plain", 4)
        assert [each.id for each in kind.list(limit=1)][:2] == [named.id, stored.id]  # two pages
        assert [each.id for each in kind.list(ids=[stored.id])] == [stored.id]
        assert kind.retrieve_metadata(stored.id) == stored
        for each in (stored, named):
            assert kind.delete(each.id).id == each.id


def errors() -> None:
    for wrong, kind, named in (
        ({"model": "nobody"}, anthropic.NotFoundError, "not_found_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"nonsense": 1}}, anthropic.BadRequestError, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": "a " * 600_000}]},
            anthropic.ContentTooLargeError,
            "request_too_large",
        ),
    ):
        for stream in (False, True):
            try:
                client.messages.create(**said(**wrong), stream=stream)
            except kind as error:
                assert error.body["error"]["message"] and error.request_id, error
                assert error.body["error"]["type"] == named
            else:
                raise AssertionError(f"{list(wrong)} was taken")


for part in (messages, tools, structured, betas, models, batches, files, errors):
    part()
print(f"anthropic {anthropic.__version__}: messages, tools, structured output, betas, models, batches, files, errors")
