"""No request decides for how long the event loop of an api process stands still.

Measured is for how long the loop stood still (tests/redis/event_loops.py), over the time of a piece of work of known
size at the same moment, so that neither a busy nor a slow machine counts.
"""

import base64
import json
from functools import partial
from typing import Any

import httpx
import numpy as np

from shared.networks.tensors import pack, unpack
from shared.sequences import SequenceSpec
from tests.redis.event_loops import LONGEST, event_loop, least_stop
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.redis.test_api_adapters import files
from tests.unit.networks import LSTM, weights_of
from tests.waiting import HANG_S, wait_until

VALUES = 199_000
_HI = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [_HI], "max_tokens": 4, **fields}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [_HI], "max_tokens": 4, **fields}


def schema(described: Any) -> dict[str, Any]:
    return chat(structured_outputs={"json": described})


MEGABYTE = "1 23 " * 200_000
RULES = "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(600)) + '\nr600 ::= "x"'
LARK = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(5000)) + '\nr5000: "x"'
PARTS = [{"role": "user", "content": [{"type": "text", "text": "é"}] * 8}] * 1100
CALLS = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}] * 4900}]
USES = [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}] * 4900}, _HI]
SAID = [{"role": "user", "content": "x" * 6} for _ in range(15)] + [{"type": "reasoning", "summary": []}] * 4000
CUSTOM = {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": f"f{at}"} for at in range(128)]}
SPACES = [{**CUSTOM, "name": f"n{at}"} for at in range(70)]
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": CUSTOM["tools"]}
EDITS = [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "é" * 50}] * 4096
FILES = [{"role": "user", "content": [{"type": "input_file", "file_data": base64.b64encode(b"x" * 700_000).decode()}]}]
TOOL = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(80)}}
PATTERNS = {"patternProperties": {f"^a{at}[a-z]*b": {} for at in range(60)}, "type": "object"}

VECTOR = np.linspace(0.1, 0.9, 2048, dtype="<f4").tobytes()
NEST: Any = 1
for _ in range(50):
    NEST = {"a": NEST} if isinstance(NEST, list) else [NEST]

LEARNED = {"prompt_ids": [5] * 100, "completion_ids": [5] * 150, "logprobs": [-0.123456] * 150, "reward": 1.0}

_NO_COMMA = {"type": "image_url", "image_url": {"url": "data:image/png" + ";a=b" * 4_000_000}}
_LARGE_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * 2_000_000}}
_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K" * 2_000_000}}
ASKED = {"model_id": "s:train:0", "seq_id": 1}
DATUM = {"model_input": {"chunks": [{"tokens": [5]}]}, "loss_fn_inputs": {}}
PASSES = {"data": [DATUM] * 4096, "loss_fn": "ppo"}
LONG_PASS = {"data": [{**DATUM, "model_input": {"chunks": [{"tokens": [5] * 1_000_000}]}}], "loss_fn": "ppo"}
DRAWN = {"prompt": {"chunks": [{"tokens": [5] * VALUES}]}, "sampling_params": {"max_tokens": 1}}

WORST: dict[str, tuple[str, Any]] = {
    "a long prompt": ("/v1/completions", {"model": MODEL, "prompt": MEGABYTE}),
    "many prompts": ("/v1/completions", {"model": MODEL, "prompt": ["ab " * 300] * 1000}),
    "a long prompt of ids": ("/v1/completions", {"model": MODEL, "prompt": [5] * VALUES}),
    "many choices": ("/v1/completions", {"model": MODEL, "prompt": [[5] * 190] * 4, "n": 100, "logprobs": 20}),
    "wrong stop ids": ("/v1/completions", {"model": MODEL, "prompt": "a", "stop_token_ids": ["a"] * VALUES}),
    "biases": ("/v1/completions", {"model": MODEL, "prompt": "a", "logit_bias": {str(i): 1 for i in range(90_000)}}),
    "blanks that might be Lark": (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"grammar": "\n" * 200_000}},
    ),
    "a long message": ("/v1/chat/completions", chat(messages=[{"role": "user", "content": MEGABYTE}])),
    "an image without a comma": ("/v1/chat/completions", chat(messages=[{"role": "user", "content": [_NO_COMMA]}])),
    "a large image": ("/v1/chat/completions", chat(messages=[{"role": "user", "content": [_LARGE_IMAGE]}])),
    "many messages": ("/v1/chat/completions", chat(messages=[_HI] * 4096)),
    "too many messages": ("/v1/chat/completions", chat(messages=[{"role": "user"}] * 9990)),
    "many parts": ("/v1/chat/completions", chat(messages=PARTS)),
    "many calls": ("/v1/chat/completions", chat(messages=CALLS)),
    "unknown fields": ("/v1/chat/completions", chat(**{f"x{i}": 1 for i in range(60_000)})),
    "rules": ("/v1/chat/completions", chat(structured_outputs={"grammar": RULES})),
    "rules that overflow": ("/v1/chat/completions", chat(structured_outputs={"grammar": LARK})),
    "a regular expression": ("/v1/chat/completions", chat(structured_outputs={"regex": "(a|b)*a(a|b){900}"})),
    "choices": ("/v1/chat/completions", chat(structured_outputs={"choice": [f"c{i}" for i in range(10_000)]})),
    "patterns": ("/v1/chat/completions", schema(PATTERNS)),
    "properties": ("/v1/chat/completions", schema({"properties": {f"p{i}": {} for i in range(9900)}})),
    "a schema as deep text": ("/v1/chat/completions", schema('{"a":' * 100_000 + "1" + "}" * 100_000)),
    "tools": (
        "/v1/chat/completions",
        chat(tools=[{"type": "function", "function": {"name": f"f{i}", "parameters": TOOL}} for i in range(115)]),
    ),
    "items": ("/v1/responses", {"model": MODEL, "input": [_HI] * 9990, "store": False}),
    "items to be kept": ("/v1/responses", {"model": MODEL, "input": SAID}),
    "a response in the background": ("/v1/responses", {"model": MODEL, "input": SAID, "background": True}),
    "items to count": ("/v1/responses/input_tokens", {"model": MODEL, "input": SAID}),
    "items to compact": ("/v1/responses/compact", {"model": MODEL, "input": SAID}),
    "tools of namespaces": ("/v1/responses", {"model": MODEL, "input": "hi", "tools": SPACES}),
    "choices of tools": ("/v1/responses", {"model": MODEL, "input": "hi", "tools": [CUSTOM], "tool_choice": ALLOWED}),
    "calls of custom tools": ("/v1/responses", {"model": MODEL, "input": EDITS}),
    "files of text": ("/v1/responses", {"model": MODEL, "input": FILES}),
    "items of a conversation": ("/v1/conversations", {"items": [_HI] * 4096}),
    "a long item of a conversation": ("/v1/conversations", {"items": MEGABYTE}),
    "wrong items of a conversation": ("/v1/conversations", {"items": [{"type": "reasoning", "summary": [{}]}] * 4900}),
    "metadata of a conversation": ("/v1/conversations", {"metadata": {f"k{i}": "v" for i in range(60_000)}}),
    "wrong items": ("/v1/responses", {"model": MODEL, "input": [{"type": "reasoning", "summary": [{}]}] * 4900}),
    "a long turn": ("/v1/messages", message(messages=[{"role": "user", "content": MEGABYTE}])),
    "many turns": ("/v1/messages", message(messages=[_HI] * 4096)),
    "many blocks": ("/v1/messages", message(messages=PARTS)),
    "wrong blocks": ("/v1/messages", message(messages=[{"role": "user", "content": [{"type": "x"}] * 9900}])),
    "many uses of tools": ("/v1/messages", message(messages=USES)),
    "lines for billing": ("/v1/messages", message(system="x-anthropic-a: 1\n" * 50_000)),
    "blanks before the system prompt": ("/v1/messages", message(system=[{"type": "text", "text": " " * 900_000}])),
    "tools of messages": (
        "/v1/messages",
        message(tools=[{"name": f"f{i}", "input_schema": TOOL} for i in range(115)], tool_choice={"type": "any"}),
    ),
    "a large block": ("/v1/messages", message(messages=[{"role": "user", "content": [_BLOCK]}])),
    "turns to count": ("/v1/messages/count_tokens", {"model": MODEL, "messages": PARTS}),
    "many inputs": ("/v1/embeddings", {"model": MODEL, "input": ["ab " * 150] * 2000}),
    "a template of places": (
        "/v1/classifications",
        {"model": MODEL, "input": ["a" * 1000] * 500, "labels": ["a", "b"], "template": "{input}" * 60_000},
    ),
    "many labels": (
        "/v1/classifications",
        {"model": MODEL, "input": ["a"] * 4, "labels": [f"{i}" for i in range(64)]},
    ),
    "text to tokens": ("/tokenize", {"model": MODEL, "prompt": MEGABYTE, "return_token_strs": True}),
    "tokens to text": ("/detokenize", {"model": MODEL, "tokens": [5] * VALUES}),
    "wrong tokens": ("/detokenize", {"model": MODEL, "tokens": [-1] * VALUES}),
    "many data of a pass": ("/api/v1/forward_backward", {**ASKED, "forward_backward_input": PASSES}),
    "a pass of many numbers": ("/api/v1/forward", {**ASKED, "forward_backward_input": LONG_PASS}),
    "a sample of many ids": ("/api/v1/asample", {"sampling_session_id": "s", "seq_id": 1, **DRAWN}),
    "telemetry": ("/api/v1/telemetry", {"events": [{"a": 1}] * 9900}),
    "prompts to generate": ("/generate", {"model": MODEL, "prompts": ["a"] * VALUES}),
    "ids to generate": ("/inference/v1/generate", {"model": MODEL, "token_ids": [5] * VALUES}),
    "observations": ("/v1/rl/act", {"model": MODEL, "observations": [[_HI] * 9] * 300}),
    "numbers for a language model to observe": ("/v1/rl/act", {"model": MODEL, "observations": [[1.5] * 180] * 1000}),
    "embeddings to predict": (
        "/v1/predict",
        {"model": MODEL, "inputs": {"text": ["a"] * 256}, "outputs": ["embedding"]},
    ),
    "inputs to predict": ("/v1/predict", {"model": MODEL, "inputs": {"text": ["ab " * 300] * 1000}}),
    "tensors for a language model": ("/v1/predict", {"model": MODEL, "inputs": {"x": [[1.5] * 1000] * 190}}),
    "wrong prompts of a job": ("/v1/jobs", {"kind": "generate", "model": MODEL, "prompts": [[[]]] * 90_000}),
    "a large image of a job": (
        "/v1/jobs",
        {"kind": "generate", "prompts": [[{"role": "user", "content": [_LARGE_IMAGE]}]]},
    ),
    "prompts of a job": ("/v1/jobs", {"kind": "generate", "model": MODEL, "prompts": [[5]] * 49_000}),
    "feedback": ("/v1/feedback", {"id": "x", "rating": "up", "text": "x" * 900_000}),
    "unknown fields of feedback": ("/v1/feedback", {f"x{i}": 1 for i in range(60_000)}),
    "trajectories": ("/v1/training/update", {"trajectories": [LEARNED] * 4096}),
    "items of a response": ("/v1/responses", {"model": MODEL, "input": [_HI] * 4000, "truncation": "auto"}),
    "floats": ("/v1/chat/completions", chat(chat_template_kwargs={"x": [1.5] * 190_000})),
    "short strings": ("/v1/chat/completions", chat(chat_template_kwargs={"x": ["é"] * 100_000})),
    "nests": ("/v1/chat/completions", chat(chat_template_kwargs={"x": [NEST] * 380})),
    "competitors": (
        "/v1/completions",
        {"model": MODEL, "prompt": [[5] * 60] * 8, "n": 25, "logprobs": 20, "max_tokens": 190},
    ),
    "samples": ("/generate", {"model": MODEL, "prompts": ["a"] * 200, "max_tokens": 200, "logprobs": True}),
    "a sample of tokens": (
        "/inference/v1/generate",
        {"model": MODEL, "token_ids": [5], "sampling_params": {"n": 100, "max_tokens": 200, "logprobs": 20}},
    ),
    "texts to embed": ("/v1/embeddings", {"model": MODEL, "input": ["a"] * 2000}),
    "texts to pool": ("/pooling", {"model": MODEL, "input": ["a"] * 200}),
    "texts to rank": ("/rerank", {"model": MODEL, "query": "a", "documents": ["b"] * 200}),
    "texts to score": ("/score", {"model": MODEL, "text_1": ["a"] * 100, "text_2": ["b"] * 100}),
    "brackets": ("/v1/completions", b"[]" * 500_000),
    "depth": ("/v1/completions", b'{"a":' * 150_000),
    "strings": ("/v1/completions", b'"",' * 340_000),
}


async def a_long_history(http: httpx.AsyncClient) -> None:
    """Many items, told in a conversation and in a response, asked for again and followed."""
    items = [_HI] * 2048
    talk = (await http.post("/v1/conversations", json={"items": items})).json()["id"]
    path = f"/v1/conversations/{talk}/items"
    assert (await http.post(path, json={"items": items})).status_code == 200
    assert len((await http.get(path, params={"limit": 100})).json()["data"]) == 100
    refused = await http.post("/v1/responses", json={"model": MODEL, "input": "hi", "conversation": talk})
    assert refused.status_code == 400, refused.text
    made = await http.post("/v1/responses", json={"model": MODEL, "input": SAID})
    assert made.status_code == 200, made.text
    name = made.json()["id"]
    assert (await http.get(f"/v1/responses/{name}/input_items")).json()["has_more"]
    mine = [{"type": "item_reference", "id": f"rs_{name[5:]}_i{at:04d}"} for at in range(15, 4000)]
    foreign = [{"type": "item_reference", "id": f"msg_{at}_00"} for at in range(1000)]
    for references, status in (([*SAID[:1], *mine], 200), (foreign, 404)):
        answer = await http.post("/v1/responses", json={"model": MODEL, "input": references})
        assert answer.status_code == status, answer.text[:300]
    followed = {
        "model": MODEL,
        "input": "hi",
        "previous_response_id": name,
        "truncation": "auto",
        "max_output_tokens": 9,
    }
    last = await http.post("/v1/responses", json=followed)
    assert last.status_code == 200, last.text


def said(spec: SequenceSpec) -> Answer:
    """As much as is asked for."""
    if spec.kind == "network":
        return Answer(embedding=pack({"y": unpack(spec.tensors)["x"]}))
    return Answer("ab " * (spec.sampling.max_tokens // 4), at_once=True, competitors=20, embedding=VECTOR)


async def a_batch(http: httpx.AsyncClient) -> None:
    """Thousands of lines: sent, looked through while the batch is validated, and sent back."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
    url = "/v1/completions"
    lines = [{"custom_id": f"{at}", "method": "POST", "url": url, "body": body} for at in range(4000)]
    lines.append({**lines[0], "method": "GET"})
    data = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    file = (await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", data)})).json()
    made = await http.post(
        "/v1/batches", json={"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    )
    assert made.status_code == 200, made.text

    async def looked_through() -> bool:
        return (await http.get(f"/v1/batches/{made.json()['id']}")).json()["status"] == "failed"

    await wait_until(looked_through)
    assert (await http.get(f"/v1/files/{file['id']}/content")).content == data


async def a_stream_read_again(http: httpx.AsyncClient) -> None:
    """All choices of a long stream at once."""
    body = {"model": MODEL, "prompt": "hi", "n": 50, "logprobs": 20, "max_tokens": 190, "stream": True}
    with_ids = {**body, "stream_options": {"include_event_ids": True}}
    first = await http.post("/v1/completions", json=with_ids)
    assert first.status_code == 200, first.text
    request = json.loads(first.text.split("data: ", 2)[1].splitlines()[0])["id"]
    again = await http.get(f"/v1/streams/{request}")
    assert again.status_code == 200 and again.text.endswith("[DONE]\n\n"), again.text[:300]
    assert again.text.count('"finish_reason":"stop"') == 50


async def a_split_of_many(http: httpx.AsyncClient) -> None:
    """A split is refused by its length, before anybody reads it."""
    wrong = {"split": "a@1:1," * 150_000, **{f"x{i}": 1 for i in range(500)}}
    for body in (wrong, {"split": ["a@1:1"] * 150_000}):
        refused = await http.put("/v1/adapters/a/split", json=body)
        assert refused.status_code in (400, 413), refused.text[:300]


async def rows_for_a_network(http: httpx.AsyncClient) -> None:
    """As many rows as it may be sent, one row with all numbers, and numbers where a name is wanted."""
    wide = {
        "inputs": {"x": {"shape": [None, 180]}},
        "layers": [{"type": "linear", "name": "y", "units": 180}],
        "outputs": {"y": {"of": "y"}},
    }
    uploaded = await http.post(
        "/upload_adapter", data={"name": "wide"}, files=files({"network": wide}, weights_of(wide))
    )
    assert uploaded.status_code == 200, uploaded.text
    row = [1.25] * 180
    for inputs, status in (
        ({"x": [[row]] * 1000}, 200),
        ({"x": [[row] * 1000]}, 200),
        ({"x": [[1.5] * 190_000]}, 400),
        ({"x": [[[1.5] * 95_000, [1.5] * 94_999]]}, 400),
        ({"x": [[["a"] * 180] * 900]}, 400),
        ({f"x{at}": 1 for at in range(60_000)}, 400),
    ):
        answer = await http.post("/v1/predict", json={"model": "wide", "inputs": inputs})
        assert answer.status_code == status, answer.text[:300]
    states = {f"x{at}": 1 for at in range(60_000)}
    act = {"model": "pole", "observations": [[0.0] * 4], "hidden_states": states}
    parts = files({"network": LSTM}, weights_of(LSTM))
    assert (await http.post("/upload_adapter", data={"name": "pole"}, files=parts)).is_success
    answer = await http.post("/v1/rl/act", json=act)
    assert answer.status_code == 400 and "no state 'x0'" in answer.text, answer.text[:300]


ATTACKS = {
    "rows for a network": rows_for_a_network,
    "a batch": a_batch,
    "a stream read again": a_stream_read_again,
    "a long history": a_long_history,
    "a split of many": a_split_of_many,
}


async def test_the_worst_that_each_endpoint_can_be_sent_stops_nobody_for_long(redis_url: str) -> None:
    found: dict[str, float] = {}
    async with (
        working(redis_url, said),
        httpx.AsyncClient(timeout=HANG_S, trust_env=False) as http,
    ):
        with event_loop(redis_url) as loop:
            http.base_url = httpx.URL(loop.url)
            first = await http.post("/v1/chat/completions", json=chat())
            assert first.status_code == 200, first.text
            assert (await http.get("/nowhere")).status_code == 404, "and FastAPI has looked at all routes"
            for name, (path, body) in WORST.items():
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                post = partial(http.post, path, content=content, headers={"content-type": "application/json"})
                answer, found[name] = await least_stop(loop, post)
                refused = (503,) if path == "/v1/training/update" else ()  # no trainer is there
                refused = (404,) if path.startswith("/api/v1/") else refused  # no such learner or sampler
                assert answer.status_code in (200, 202, 400, 413, 429, *refused), (
                    f"{name}: {answer.status_code} {answer.text[:300]}"
                )
                print(f"{name}: {found[name]:.1f} {answer.status_code} {answer.text[:80]}")
            for name, attack in ATTACKS.items():
                _, found[name] = await least_stop(loop, partial(attack, http))
                print(f"{name}: {found[name]:.1f}")
    slow = {name: round(times, 1) for name, times in found.items() if times > LONGEST}
    assert not slow, f"for how long the event loop stood still, in times of the known work: {slow}"
