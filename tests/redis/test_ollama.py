"""Ollama's API against a worker that says what a script tells it: shapes, lines, ends, errors."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from shared.frames import Finish
from shared.sequences import SequenceSpec
from shared.text.codec import TokenizerBundle
from tests.redis import scripted_worker
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.unit.api_texts import bundle, codec

TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.tool_calls %}{{ m.tool_calls[0].id }}{% endif %}\
{{ m.tool_call_id }}{{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and not enable_thinking -%}
<think></think>{% endif %}{% endif %}"""
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
ANSWERS = {
    "say": Answer("hello"),
    "think": Answer("<think>so so</think>\n\nhello"),
    "call": Answer(f"Now: {CALL}"),
    "long": Answer("hello", Finish("length")),
    "fail": Answer("he", Finish("error", error_code="engine_error", error_message="broken")),
    "json": Answer('{"a": 1}'),
}
VECTOR = np.array([3, 4], "<f4")


def script(spec: SequenceSpec) -> Answer:
    """By the last word of the prompt."""
    if spec.kind == "embed":
        return Answer(embedding=VECTOR.tobytes())
    said = codec().decode(spec.prompt_ids).removesuffix("assistant: ").removesuffix("assistant: <think></think>")
    return ANSWERS.get(said.split()[-1], ANSWERS["say"])


@pytest.fixture
async def worker(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedWorker]:
    plain = bundle()
    shown = TokenizerBundle(plain.tokenizer_json, TEMPLATE, plain.eos_token_ids, plain.special_tokens)
    roomy = msgspec.structs.replace(scripted_worker.CARD, context_length=2048, tokenizer_sha256=shown.sha256)
    monkeypatch.setattr(scripted_worker, "bundle", lambda: shown)
    monkeypatch.setattr(scripted_worker, "CARD", roomy)
    async with working(redis_url, script) as playing:
        yield playing


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
    async with api(redis_url) as serving:
        yield serving


def chat(word: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": word}], **fields}


async def lines(server: Api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


async def whole(server: Api, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await server.post(path, {**body, "stream": False})
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the lines of a chat add up to."""
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    for message in (part["message"] for part in parts):
        for name in ("content", "thinking"):
            if message.get(name):
                said[name] = said.get(name, "") + message[name]
        if message.get("tool_calls"):
            said["tool_calls"] = [*said.get("tool_calls", []), *message["tool_calls"]]
    return said


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{"function": call["function"]} for call in message.get("tool_calls", [])]
    return {**message, **({"tool_calls": calls} if calls else {})}


async def test_a_stream_of_lines_adds_up_to_the_whole_answer(server: Api) -> None:
    for word in ("say", "think", "call", "long"):
        body = chat(word, tools=[CLOCK])
        streamed, answer = await lines(server, "/api/chat", body), await whole(server, "/api/chat", body)
        assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
        assert without_ids(added(streamed)) == without_ids(answer["message"]), word
        for ending in (streamed[-1], answer):
            assert ending["done_reason"] == ("length" if word == "long" else "stop")
            assert ending["prompt_eval_count"] > 0 and ending["eval_count"] == len(ANSWERS[word].tokens)
            assert ending["total_duration"] >= ending["eval_duration"] > 0


async def test_calls_are_objects_and_thinking_has_a_field_of_its_own(server: Api) -> None:
    called = (await whole(server, "/api/chat", chat("call", tools=[CLOCK])))["message"]
    assert called["content"].strip() == "Now:"
    assert called["tool_calls"][0]["function"] == {"index": 0, "name": "clock", "arguments": {"zone": "UTC"}}
    thought = (await whole(server, "/api/chat", chat("think", think=True)))["message"]
    assert thought == {"role": "assistant", "content": "hello", "thinking": "so so"}


async def test_results_find_their_calls_without_ids(server: Api, worker: ScriptedWorker) -> None:
    call = {"function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    turns = [
        {"role": "user", "content": "what time"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "clock", "content": "noon"},
        {"role": "user", "content": "say"},
    ]
    await whole(server, "/api/chat", {"model": MODEL, "messages": turns, "tools": [CLOCK]})
    prompt = codec().decode(worker.specs[-1].prompt_ids)
    assert '"name": "clock"' in prompt and "<tool_response>\nnoon\n</tool_response>" in prompt


async def test_options_reach_the_sampler_and_others_are_named(server: Api, worker: ScriptedWorker) -> None:
    options = {"temperature": 0.3, "top_k": 7, "num_predict": 9, "seed": 5, "stop": ["x"], "num_ctx": 9, "numa": True}
    answer = await server.post("/api/chat", chat("say", options=options, keep_alive="5m", stream=False))
    assert answer.headers["x-parallm-unused-parameters"] == "keep_alive, options.num_ctx, options.numa"
    drawn = worker.specs[-1].sampling
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.max_tokens) == (0.3, 7, 0.9, 9)
    assert (drawn.seed, drawn.stop) == (5, ("x",))
    await whole(server, "/api/chat", chat("say"))
    spec = worker.specs[-1]
    assert spec.sampling.max_tokens == 2048 - len(spec.prompt_ids), "unsaid: what the context leaves"


async def test_formats_become_grammars(server: Api, worker: ScriptedWorker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for path, asked in (("/api/chat", chat("json")), ("/api/generate", {"model": MODEL, "prompt": "json"})):
        for form in ("json", schema):
            await whole(server, path, {**asked, "format": form})
            assert worker.specs[-1].sampling.grammar, (path, form)
    await whole(server, "/api/generate", {"model": MODEL, "prompt": "json", "raw": True, "format": schema})
    assert worker.specs[-1].sampling.grammar


async def test_generate_goes_on_from_the_context_of_its_last_answer(server: Api, worker: ScriptedWorker) -> None:
    first = await whole(server, "/api/generate", {"model": f"{MODEL}:latest", "prompt": "say", "system": "be kind"})
    assert first["response"] == "hello" and first["model"] == MODEL
    assert codec().decode(first["context"]).startswith("system: be kind\nuser: say\nassistant: hello")
    await whole(server, "/api/generate", {"model": MODEL, "prompt": "long", "context": first["context"]})
    assert list(worker.specs[-1].prompt_ids[: len(first["context"])]) == first["context"]
    raw = await whole(server, "/api/generate", {"model": MODEL, "prompt": "just say", "raw": True})
    assert codec().decode(worker.specs[-1].prompt_ids) == "just say" and raw["response"] == "hello"


async def test_a_chat_that_is_too_long_loses_its_oldest_turns(server: Api, worker: ScriptedWorker) -> None:
    turns = [{"role": "system", "content": "be kind"}]
    turns += [{"role": "user", "content": f"{number} " + "x" * 800} for number in range(4)]
    turns += [{"role": "user", "content": "say"}]
    await whole(server, "/api/chat", {"model": MODEL, "messages": turns})
    prompt = codec().decode(worker.specs[-1].prompt_ids)
    assert prompt.startswith("system: be kind\nuser: 2 xx") and "user: 3 xx" in prompt
    refused = await server.post("/api/chat", {"model": MODEL, "messages": turns, "truncate": False})
    assert refused.status_code == 400 and "takes up to 2048" in refused.json()["error"]


async def test_a_request_without_words_says_that_the_model_is_there(server: Api, worker: ScriptedWorker) -> None:
    loaded = await server.post("/api/chat", {"model": MODEL, "messages": []})
    assert loaded.json()["done_reason"] == "load" and loaded.json()["done"]
    unloaded = await server.post("/api/generate", {"model": MODEL, "keep_alive": 0})
    assert unloaded.json()["done_reason"] == "unload" and unloaded.json()["response"] == ""
    assert worker.specs == []


async def test_errors_have_ollama_s_shape(server: Api) -> None:
    unknown = await server.post("/api/chat", {"model": "gone", "messages": [{"role": "user", "content": "say"}]})
    assert unknown.status_code == 404 and set(unknown.json()) == {"error"} and "gone" in unknown.json()["error"]
    wrong: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("/api/chat", chat("say", colour=1), "colour"),
        ("/api/chat", chat("say", options={"temperature": 9}), "options.temperature"),
        ("/api/chat", chat("say", options={"mirostat": 2}), "mirostat"),
        ("/api/chat", chat("say", format="xml"), "format"),
        ("/api/generate", {"model": MODEL, "prompt": "say", "suffix": "x"}, "suffix"),
        ("/api/generate", {"model": MODEL, "prompt": "say", "raw": True, "system": "x"}, "raw"),
    )
    for path, body, named in wrong:
        answer = await server.post(path, body)
        assert answer.status_code == 400 and named in answer.json()["error"], (named, answer.text)
    gone = await server.http.request("DELETE", "/api/delete", json={"model": MODEL})
    assert gone.status_code == 404 and set(gone.json()) == {"error"}
    streamed = await lines(server, "/api/chat", chat("fail"))
    assert set(streamed[-1]) == {"error"} and "broken" in streamed[-1]["error"]


async def test_vectors_are_of_length_one_but_by_the_older_route(server: Api) -> None:
    two = (await server.post("/api/embed", {"model": MODEL, "input": ["a", "b"]})).json()
    assert np.allclose(two["embeddings"], [[0.6, 0.8]] * 2) and two["prompt_eval_count"] == 2
    assert (await server.post("/api/embed", {"model": MODEL, "input": []})).json()["embeddings"] == []
    older = (await server.post("/api/embeddings", {"model": MODEL, "prompt": "a"})).json()
    assert older == {"embedding": [3.0, 4.0]}


async def test_models_are_listed_and_described(server: Api, worker: ScriptedWorker) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = (await server.http.get(path)).json()["models"]
        assert model["name"] == model["model"] == MODEL and model["digest"] == "base"
    facts = (await server.post("/api/show", {"model": f"{MODEL}:latest"})).json()
    architecture = facts["model_info"]["general.architecture"]
    assert facts["model_info"][f"{architecture}.context_length"] == 2048
    assert {"completion", "tools", "thinking"} <= set(facts["capabilities"]) and facts["template"] == TEMPLATE
    assert (await server.post("/api/show", {"name": "gone"})).status_code == 404
    assert (await server.post("/api/pull", {"model": MODEL, "stream": False})).json() == {"status": "success"}
    assert (await server.post("/api/pull", {"model": "gone"})).status_code == 404
    assert "version" in (await server.http.get("/api/version")).json()


async def test_ollama_s_greeting_is_on_its_own_port_alone(redis_url: str, worker: ScriptedWorker) -> None:
    async with api(redis_url) as plain:
        assert (await plain.http.get("/")).status_code == 404
        port = httpx.URL(plain.url).port
        plain.ring.settings.ollama_port = port or 0
        assert (await plain.http.get("/")).text == "Ollama is running"
