"""Completions that must have a form, asked for with the openai client, next to ones that need not."""

import asyncio
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.e2e.rings import MODEL, Ring, ring
from tests.waiting import wait_until

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 999}, "unit": {"enum": ["kg", "m"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "measure", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    with ring(tmp_path_factory.mktemp("ring"), "--workers", "2", "--lease-ms", "1000") as started:
        asyncio.run(wait_until(lambda: len(started.server.printed("worker.ready")) == 2))
        yield started


@pytest.fixture
def client(served: Ring):
    with OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as made:
        yield made


class Measure(BaseModel):
    answer: bool
    unit: Literal["kg", "m"]


def test_a_schema_holds_among_plain_neighbours(client: OpenAI) -> None:
    def ask(at: int) -> str:
        extra = {"response_format": FORMAT} if at % 2 else {}
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, temperature=1.2, seed=at, max_tokens=256, **extra
        )
        assert answer.choices[0].finish_reason == "stop" or not at % 2
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    for text in answers[1::2]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert "tiny" in "".join(answers[::2])


def test_the_clients_own_parser_takes_the_answer(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Measure, max_tokens=256)
    assert isinstance(answer.choices[0].message.parsed, Measure)


def test_a_stream_is_the_same_json(client: OpenAI) -> None:
    asked = {
        "model": MODEL,
        "messages": HELLO,
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 256,
        "response_format": FORMAT,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_json_object_is_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=1.0, seed=2, max_tokens=200, response_format={"type": "json_object"}
    )
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        assert (choice.message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"\d{3}-[xyz]{2}"}, r"\d{3}-[xyz]{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'root ::= "go " ("north" | "south")'}, "go (north|south)"),
        ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, r'\{"answer":\d+,"unit":"(kg|m)"\}'),
    ],
)
def test_vllms_structured_outputs(client: OpenAI, wanted: dict, pattern: str) -> None:
    extra = {"structured_outputs": wanted}
    for seed in range(3):
        answer = client.completions.create(
            model=MODEL, prompt="hello", temperature=1.5, seed=seed, max_tokens=64, extra_body=extra
        )
        assert re.fullmatch(pattern, answer.choices[0].text)
        assert answer.choices[0].finish_reason == "stop"


def test_the_schema_true_is_any_json(client: OpenAI) -> None:
    wanted = {"structured_outputs": {"json": True}}
    answer = client.completions.create(model=MODEL, prompt="hello", temperature=0, max_tokens=200, extra_body=wanted)
    assert answer.choices[0].finish_reason == "length" or json.loads(answer.choices[0].text) is not Ellipsis


def test_max_tokens_cuts_json_with_length(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, response_format=FORMAT)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}},
            "response_format",
            "foo",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}}},
            "response_format",
            "uniqueItems",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}},
            "response_format",
            "nothing",
        ),
        ({"structured_outputs": {"grammar": "start: start"}}, None, "cannot go on"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {"grammar": "??"}}, "structured_outputs", "neither GBNF nor Lark"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not JSON"),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"structured_outputs": {"choice": ["a"]}, "min_tokens": 4}, "min_tokens", "min_tokens"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    client: OpenAI, body: dict, param: str | None, word: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=64, extra_body=body)
    error = raised.value.response.json()["error"]
    assert error["param"] == param and word in error["message"]


def test_a_workers_death_in_the_middle_keeps_the_json_valid(served: Ring, client: OpenAI) -> None:
    numbers = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "minItems": 200,
        "maxItems": 210,
    }
    wanted = {"structured_outputs": {"json": numbers, "disable_any_whitespace": True}}
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 1900, "stream": True, "extra_body": wanted}
    streams = [client.completions.create(**asked, seed=seed) for seed in range(6)]
    texts = [next(iter(stream)).choices[0].text for stream in streams]
    os.kill(served.workers()[0].pid, signal.SIGKILL)
    for at, stream in enumerate(streams):
        texts[at] += "".join(chunk.choices[0].text for chunk in stream)
    for text in texts:
        jsonschema.validate(json.loads(text), numbers)
