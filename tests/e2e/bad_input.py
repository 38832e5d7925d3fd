"""Bad input for every route of a running server: from its own OpenAPI document, from valid requests with one thing made
wrong, and raw bytes. `python -m tests.e2e.bad_input URL --examples 300` runs long against a server that you started.

No answer may be a 5xx (504 where the request set itself a deadline, 503 where it needs a trainer), none may take longer
than HANG_S, every error is OpenAI's or Anthropic's object, and afterwards the server answers as before.
"""

import argparse
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from safetensors.numpy import save

from tests.unit.networks import LSTM, weights_of
from tests.waiting import HANG_S

MODEL = "tiny"
NETWORK, HEADS = "a-network", "with-heads"
H = 128  # of the tiny model
_TEXT = {"type": "string"}

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": MODEL,
        "prompt": "12+35=",
        "max_tokens": 4,
        "temperature": 0.5,
        "top_k": 5,
        "stop": ["x"],
        "n": 2,
        "collect_trajectory": True,
        "scoring_function": {"name": "exact", "options": {}},
        "metadata": {"reference": "47", "a": [1]},
    },
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 4,
        "logit_bias": {"5": 1.0},
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/generate": {"prompt": "12+35=", "max_tokens": 4, "seed": 1},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 1.0}},
    "/tokenize": {"model": MODEL, "prompt": "hello"},
    "/score": {"model": MODEL, "text_1": "hello", "text_2": ["good", "morning"]},
    "/rerank": {"model": MODEL, "query": "hello", "documents": ["good", "morning"], "top_n": 1},
    "/pooling": {"model": MODEL, "input": ["hello"], "task": "embed"},
    "/classify": {"model": MODEL, "input": ["12+35="], "labels": ["a", "b"]},
    "/abort_requests": {"request_ids": ["mine"]},
    "/v1/responses": {
        "model": MODEL,
        "input": [{"role": "user", "content": "hello"}],
        "max_output_tokens": 4,
        "truncation": "auto",
        "include": ["message.output_text.logprobs"],
    },
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 4,
        "system": [{"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"name": "g", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]},
    "/detokenize": {"model": MODEL, "tokens": [5, 6, 7]},
    "/v1/jobs": {
        "kind": "rollout",
        "model": MODEL,
        "prompts": [{"prompt": "1+1=", "reference": "2"}],
        "n": 2,
        "max_tokens": 4,
        "reward": {"name": "exact", "options": {}},
    },
    "/v1/training/update": {
        "trajectories": [
            {
                "prompt_ids": [5, 6],
                "completion_ids": [7, 8],
                "logprobs": [-1.0, -0.5],
                "reward": 1.0,
                "loss_mask": [1, 0],
            },
            {
                "prompt_ids": [5, 6],
                "completion_ids": [9],
                "logprobs": [-1.0],
                "reward": {"value": 0.0},
                "spans": [["", 0, 1]],
            },
        ],
        "update_inference": False,
    },
    "/training/checkpoint": {"name": "mine"},
    "/v1/rewards/score": {
        "completions": ["a", "b"],
        "prompts": ["c", [{"role": "user", "content": "d"}]],
        "references": ["a", "a"],
        "model": MODEL,
        "reward": {"name": "judge", "marks": {"1": 0, "2": 1}, "template": "{prompt} {completion}", "lead": "so "},
    },
    "/load_adapter": {"adapter_path": "somewhere"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "somewhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/model/switch-lora": {"lora_name": "a"},
    "/v1/classifications": {"input": ["good", "bad"], "labels": ["a", "b"], "model": MODEL, "return_scores": True},
    "/v1/predict": {"model": MODEL, "inputs": {"input_ids": [[5, 6, 7]]}, "outputs": ["embedding"]},
    "/v1/rl/act": {"model": MODEL, "observations": ["left or right?"], "actions": ["left", "right"], "seed": 1},
    "/v1/feedback": {"id": "chatcmpl-1", "choice": 0, "reward": 0.5, "text": "so so", "key": "k"},
    "/v1/adapters/a/promote": {"version": 1},
    "/v1/adapters/a/reject": {"version": 1, "gate": [{"name": "kl", "passed": False, "detail": "far"}]},
    "/v1/adapters/a/best": {"version": 1, "value": 0.5},
}

_MEMORY = {"memory.h": [[0.0] * 8], "memory.c": [[0.0] * 8]}
ALSO: list[tuple[str, dict[str, Any]]] = [  # further requests to these routes, of what `upload` serves
    (
        "/v1/predict",
        {"model": NETWORK, "inputs": {"observation": [[0.1, 0, 1, 2]], **_MEMORY}, "outputs": ["memory.h"]},
    ),
    (
        "/v1/predict",
        {
            "model": NETWORK,
            "inputs": {"observation": {"dtype": "float32", "shape": [1, 4], "data": "AAAAAAAAAAAAAAAAAAAAAA=="}},
            "encoding_format": "base64",
        },
    ),
    ("/v1/rl/act", {"model": NETWORK, "observations": [[0.1, 0, 1, 2]], "hidden_states": _MEMORY, "seed": 1}),
    ("/v1/rl/act", {"model": NETWORK, "observations": [[1, 2, 3, 4]], "session_id": "s", "reset": True}),
    ("/v1/rl/act", {"model": NETWORK, "observations": [[1, 2, 3, 4]], "session_id": "s", "session_step": 1}),
    ("/v1/rl/act", {"model": HEADS, "observations": ["x", [5, 6]], "head": "policy", "deterministic": True}),
    ("/v1/rl/act", {"model": HEADS, "observations": [[{"role": "user", "content": "x"}]], "head": "force"}),
    ("/v1/classifications", {"model": HEADS, "input": ["good", "bad"], "head": "topic"}),
    ("/v1/rewards/score", {"reward": {"name": "model", "model": HEADS, "head": "reward"}, "completions": ["a"]}),
    ("/v1/feedback", {"id": "chatcmpl-1", "preferred_over": "chatcmpl-2", "preferred_over_choice": 1}),
    (f"/v1/adapters/{HEADS}/split", {"split": f"{HEADS}@1:0.9,{HEADS}@2:0.1", "floor": 0.01, "verdict_after": 400}),
]

WRONG: list[Any] = [
    None, True, "", "x", " ", "\x00", "\ud800", "😀" * 50, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0,
    float("nan"), float("inf"), float("-inf"), 1e308, [], [[]], [None], ["x"] * 3000, [1] * 3000, [-1], [2**70], [448],
    [0.5], [float("nan")], {}, {"": ""}, {"a": {"b": []}}, {"1": float("nan")}, {"-5": 1}, {"999999999": 1.0},
    {"١": 1}, [{"type": "text"}], [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "a" * 20_000,
]  # fmt: skip

RAW = [
    b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe\x00", b'{"model": "\xff"}', b'{"model": "\xed\xa0\x80"}',
    b"[" * 100_000, b'{"a":' * 50_000, b'{"model":"tiny","prompt":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"model":"tiny","model":"tiny"}', b'{"model":"tiny","prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
    b"\x00" * 1000, b'{"\\ud800": 1}', b'{"model":"tiny","prompt":"\\ud800"}', b'{"a": "' + b"x" * 900_000,
    b'{"model":"tiny","prompt":"x","temperature":1e999}',
]  # fmt: skip


_RIGHT = [*VALID.items(), *ALSO]


def upload(url: str) -> None:
    """Serve a recurrent network that acts, and heads of every kind on the tiny model."""
    heads = {
        "reward": {"kind": "scalar"},
        "topic": {"kind": "labels", "labels": ["a", "b"]},
        "policy": {"kind": "categorical", "labels": ["left", "right"]},
        "force": {"kind": "gaussian", "size": 2},
    }
    sizes = {"reward": 1, "topic": 2, "policy": 2, "force": 4}
    tensors = {f"heads.{name}.weight": np.full((size, H), 0.01, np.float32) for name, size in sizes.items()}
    with httpx.Client(base_url=url, timeout=HANG_S) as http:
        for name, weights, config in (
            (NETWORK, weights_of(LSTM), {"network": LSTM}),
            *[(HEADS, tensors, {"heads": heads})] * 2,
        ):
            files = {"a": ("adapters.safetensors", save(weights)), "c": ("adapter_config.json", json.dumps(config))}
            http.post("/upload_adapter", data={"name": name}, files=files).raise_for_status()


@dataclass
class Findings:
    """What was sent, and what came back wrong."""

    answers: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def judge(self, what: str, send: Callable[[], Any], *, deadline: bool = False) -> None:
        try:
            response = send()
            until = time.monotonic() + HANG_S
            while response.status_code in (503, 529) and "more to do" in response.text and time.monotonic() < until:
                time.sleep(0.25)  # the machine is busy, and the server says so: once more, as a client would
                response = send()
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
            return
        status = response.status_code
        self.answers[status] += 1
        absent = status == 503 and "no trainer" in response.text  # the ring has none
        if status >= 500 and not absent and not (status == 504 and deadline):
            self.wrong.append(f"{what}: {status} {response.text[:300]}")
        elif status >= 400:
            try:
                told = json.loads(response.text)
                if " /api/" in what and " /api/v1/" not in what:  # Ollama's errors are a text
                    assert isinstance(told["error"], str) and told["error"]
                    return
                theirs = {"param", "code"} if "type" not in told else set()  # Anthropic's object has none
                assert set(told["error"]) >= {"message", "type", *theirs}
            except Exception:
                self.wrong.append(f"{what}: {status} is no error object: {response.text[:300]}")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with something else at one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], new)
    return copy


def encoded(value: Any) -> bytes:
    """JSON with NaN, and with halves of surrogate pairs as escapes."""
    return json.dumps(value).encode()


def ways_to_be_wrong(fields: dict[str, list[str]]) -> st.SearchStrategy[tuple[str, bytes]]:
    """A valid request in which one or two places hold something else, or a field of its schema is added."""

    @st.composite
    def wrong(draw: st.DrawFn) -> tuple[str, bytes]:
        path, right = draw(st.sampled_from(_RIGHT))
        body: Any = right
        for _ in range(draw(st.integers(1, 2))):
            value = draw(st.sampled_from(WRONG))
            if draw(st.booleans()) and isinstance(body, dict):
                body = {**body, draw(st.sampled_from(fields[path])): value}
            else:
                body = put(body, draw(st.sampled_from(list(places(body)))), value)
        return path, encoded(body)

    return wrong()


def method_of(path: str) -> str:
    """Of a route that takes a body."""
    return "PUT" if path.endswith("/split") else "POST"


def fields_of(document: dict[str, Any]) -> dict[str, list[str]]:
    """The fields that each route of VALID knows, and one that none knows."""
    schemas, found = document["components"]["schemas"], {}
    for path, _ in _RIGHT:
        route = re.sub("/adapters/[^/]+/", "/adapters/{name}/", path)
        schema = document["paths"][route][method_of(path).lower()]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        name = schema.get("$ref", "").rpartition("/")[2]
        found[path] = ["unheard_of", *sorted((schemas[name] if name else schema).get("properties", {}))]
    return found


def bounded(examples: int, derandomize: bool) -> Any:
    return settings(
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def mutate(url: str, findings: Findings, examples: int, derandomize: bool = True) -> None:
    """Valid requests made wrong."""
    with httpx.Client(base_url=url, timeout=HANG_S) as http:
        document = http.get("/openapi.json").json()

        @bounded(examples, derandomize)
        @given(ways_to_be_wrong(fields_of(document)))
        def try_one(case: tuple[str, bytes]) -> None:
            path, body = case
            findings.judge(
                f"POST {path} {body[:300]!r}",
                lambda: http.request(method_of(path), path, content=body, headers={"content-type": "application/json"}),
                deadline=b"deadline" in body or b"timeout" in body,
            )

        try_one()


def raw(url: str, findings: Findings) -> None:
    """Bodies that are no requests at all."""
    with httpx.Client(base_url=url, timeout=HANG_S) as http:
        for path in dict(_RIGHT):
            for body in RAW:
                for kind in ("application/json", "multipart/form-data; boundary=x", "text/plain"):
                    headers = {"content-type": kind}
                    findings.judge(
                        f"POST {path} {kind} {body[:80]!r}",
                        lambda path=path, body=body, headers=headers: http.request(
                            method_of(path), path, content=body, headers=headers
                        ),
                    )


def modes(description: dict[str, Any]) -> list[Any]:
    """Not wrong where all that a route takes is text of any kind: schemathesis would search for a second in vain."""
    from schemathesis import GenerationMode  # see `explore`

    words = {"title", "description", "default"}
    free = all(
        taken["in"] in ("path", "header") and {k: v for k, v in taken["schema"].items() if k not in words} == _TEXT
        for taken in description.get("parameters", [])
    )
    only_text = free and "requestBody" not in description
    return [GenerationMode.POSITIVE] if only_text else [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


def explore(url: str, findings: Findings, examples: int, derandomize: bool = True) -> None:
    """What schemathesis makes of our OpenAPI document, both right and wrong by it."""
    import schemathesis  # a second, and every process of the tests looks into this file

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in modes(operation.definition.raw):

            @bounded(examples, derandomize)
            @given(case=operation.as_strategy(generation_mode=mode))
            def try_one(case: Any) -> None:
                if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                    case.body["model"] = MODEL  # else most end as an unknown model
                label = f"{case.method} {case.path} {case.path_parameters} {case.query} {str(case.body)[:300]}"
                asked = str(case.body)
                findings.judge(
                    label,
                    lambda: case.call(timeout=HANG_S),
                    deadline="deadline" in asked or "timeout" in asked,
                )

            with contextlib.suppress(Unsatisfiable):  # a route that takes nothing cannot be given anything wrong
                try_one()


def main() -> int:
    """Run everything against a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--examples", type=int, default=300)
    options = parser.parse_args()
    findings = Findings()
    upload(options.url)
    raw(options.url, findings)
    mutate(options.url, findings, 20 * options.examples, derandomize=False)
    explore(options.url, findings, options.examples, derandomize=False)
    print("\n".join(findings.wrong))
    print(f"answers {dict(findings.answers)}; wrong {len(findings.wrong)}")
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
