"""Networks over HTTP, held against numpy: named tensors, and policies that act."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.rings import MODEL, Ring
from tests.e2e.served.test_heads import upload
from tests.e2e.served.test_predictions import post
from tests.unit.networks import CONV, GAUSSIAN, LSTM, MLP, SERIES, TOKENS, Array, computed, inputs_of, weights_of
from tests.waiting import HANG_S

PREDICT, ACT = "/v1/predict", "/v1/rl/act"
NETWORKS = {"mlp": MLP, "gaussian": GAUSSIAN, "lstm": LSTM, "series": SERIES, "conv": CONV, "tokens": TOKENS}


@pytest.fixture
def http(served: Ring) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=HANG_S) as made:
        yield made


@pytest.fixture(scope="module")
def networks(served: Ring) -> None:
    with httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        for name, described in NETWORKS.items():
            for seed in (0, 1) if name == "mlp" else (0,):
                answer = upload(http, f"net-{name}", weights_of(described, seed), {"network": described})
                assert answer.status_code == 200, answer.text


def listed(tensors: dict[str, Array]) -> dict[str, Any]:
    return {name: each.tolist() for name, each in tensors.items()}


def encoded(tensor: Array) -> dict[str, Any]:
    data = base64.b64encode(tensor.tobytes()).decode()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "data": data}


def tensor(shown: dict[str, Any]) -> Array:
    if isinstance(shown["data"], str):
        return np.frombuffer(base64.b64decode(shown["data"]), shown["dtype"]).reshape(shown["shape"])
    found = np.array(shown["data"])
    assert list(found.shape) == shown["shape"] and shown["dtype"] == "float32"
    return found


def assert_equal(found: dict[str, Any], wanted: dict[str, Array]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(tensor(found[name]), values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("rows", [1, 100])
def test_a_prediction_is_what_the_version_computes(http: httpx.Client, networks: None, name: str, rows: int) -> None:
    described = NETWORKS[name]
    inputs = inputs_of(described, rows, steps=5, seed=rows)
    seed = 1 if name == "mlp" else 0
    wanted = computed(described, weights_of(described, seed), inputs)
    answer = post(http, PREDICT, model=f"net-{name}", inputs=listed(inputs))
    assert answer["policy_version"] == f"net-{name}@{seed + 1}" and answer["model"] == f"net-{name}"
    assert_equal(answer["outputs"], wanted)
    first = next(iter(wanted))
    bytes_of = {each: encoded(value) for each, value in inputs.items()}
    answer = post(http, PREDICT, model=f"net-{name}", inputs=bytes_of, outputs=[first], encoding_format="base64")
    assert_equal(answer["outputs"], {first: wanted[first]})


def test_a_version_is_pinned_and_a_name_is_the_latest(http: httpx.Client, networks: None) -> None:
    inputs = inputs_of(MLP, 3)
    old, new = (computed(MLP, weights_of(MLP, seed), inputs) for seed in (0, 1))
    assert_equal(post(http, PREDICT, model="net-mlp@1", inputs=listed(inputs))["outputs"], old)
    follows = {"model": MODEL, "adapter": "net-mlp", "adapter_policy": "follow"}
    assert_equal(post(http, PREDICT, **follows, inputs=listed(inputs))["outputs"], new)
    assert http.post("/v1/adapters/net-mlp/rollback", json={"version": 1}).status_code == 200
    try:
        assert_equal(post(http, PREDICT, model="net-mlp", inputs=listed(inputs))["outputs"], old)
    finally:
        assert http.post("/v1/adapters/net-mlp/rollback", json={"version": 2}).status_code == 200


def test_a_state_given_back_goes_on(http: httpx.Client, networks: None) -> None:
    inputs = inputs_of(SERIES, 2, steps=6)
    whole = computed(SERIES, weights_of(SERIES), inputs)
    state: dict[str, Any] = {}
    for begin, end in ((0, 4), (4, 6)):
        part = listed({name: each[:, begin:end] for name, each in inputs.items()})
        found = post(http, PREDICT, model="net-series", inputs=part | state)["outputs"]
        np.testing.assert_allclose(tensor(found["each"]), whole["each"][:, begin:end], rtol=1e-5, atol=1e-5)
        state = {name: found[name] for name in ("first.h", "first.c", "second.h")}


def test_many_clients_at_once_get_each_their_own(http: httpx.Client, networks: None) -> None:
    asked = [(("net-mlp@1", 0), ("net-mlp@2", 1))[at % 2] + (inputs_of(MLP, 1 + at % 3, seed=at),) for at in range(48)]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "12+35="}], "max_tokens": 20}
    with ThreadPoolExecutor(16) as threads:
        chats = [threads.submit(http.post, "/v1/chat/completions", json=chat) for _ in range(4)]
        answers = list(threads.map(lambda each: post(http, PREDICT, model=each[0], inputs=listed(each[2])), asked))
        assert all(each.result().status_code == 200 for each in chats)
    for (_, seed, inputs), answer in zip(asked, answers, strict=True):
        assert_equal(answer["outputs"], computed(MLP, weights_of(MLP, seed), inputs))


RIGHT = [[0.0, 1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"inputs": {}}, "inputs", "'observation' is missing: observation (float32 [B, 4])"),
        ({"inputs": {"text": ["a"]}}, "inputs", "missing"),
        ({"inputs": {"observation": RIGHT, "x": 1}}, "inputs", "reads no 'x'; it reads observation (float32 [B, 4])"),
        ({"inputs": {"observation": [[1.0, 2.0]]}}, "inputs.observation", "[1, 2]; [B, 4]"),
        ({"inputs": {"observation": [1.0, 2.0]}}, "inputs.observation", "[2]; [B, 4]"),
        ({"inputs": {"observation": []}}, "inputs.observation", "[B, 4]"),
        ({"inputs": {"observation": [[1, 2], [3]]}}, "inputs.observation", "row 1 has shape [1]"),
        ({"inputs": {"observation": [[[1], [2, 3]]]}}, "inputs.observation", "[1, 2, 1]; [B, 4]"),
        ({"model": "net-series", "inputs": {"series": [[[1], [2, 3]]]}}, "inputs.series", "ragged"),
        ({"inputs": {"observation": [["a", 1, 2, 3]]}}, "inputs.observation", "no float32"),
        ({"inputs": {"observation": [[True] * 4]}}, "inputs.observation", "no float32"),
        ({"inputs": {"observation": [[1, 2, 3, True]]}}, "inputs.observation", "no float32"),
        ({"inputs": {"observation": [[None] * 4]}}, "inputs.observation", "no float32"),
        ({"inputs": {"observation": [[1e300, 0, 0, 0]]}}, "inputs.observation", "[0, 0] is no finite float32"),
        ({"inputs": {"observation": [[10**400, 0, 0, 0]]}}, "inputs.observation", "no float32"),
        ({"inputs": {"observation": "abc"}}, "inputs.observation", "nested lists"),
        ({"inputs": {"observation": {"data": "%%", "shape": [1, 4]}}}, "inputs.observation", "base64"),
        ({"inputs": {"observation": {"data": "AAAA", "shape": [1, 4]}}}, "inputs.observation", "3 bytes"),
        ({"inputs": {"observation": {"data": "AAAA"}}}, "inputs.observation", "needs 'shape'"),
        ({"inputs": {"observation": {"data": RIGHT, "shape": [4]}}}, "inputs.observation", "'shape' says [4]"),
        ({"inputs": {"observation": {"data": RIGHT, "shape": [-1, "a"]}}}, "inputs.observation", "list of sizes"),
        ({"inputs": {"observation": {"data": "", "shape": [0, 2**62, 2**62]}}}, "inputs.observation", "list of sizes"),
        ({"inputs": {"observation": {"data": "", "shape": [0] + [1] * 100}}}, "inputs.observation", "list of sizes"),
        ({"inputs": {"observation": {"data": RIGHT, "dtype": "int32"}}}, "inputs.observation", "float32 is wanted"),
        ({"inputs": {"observation": {"data": RIGHT, "pickle": "x"}}}, "inputs.observation", "'pickle'"),
        ({"inputs": {"observation": RIGHT * 1025}}, "inputs.observation", "1025 rows"),
        ({"inputs": {"observation": RIGHT}, "outputs": ["x"]}, "outputs[0]", "gives no 'x'; it gives action_logits"),
        ({"inputs": {"observation": RIGHT}, "outputs": []}, "outputs", "at least 1"),
        ({"inputs": {"observation": RIGHT}, "top_k": 3}, "top_k", "no next tokens"),
        ({"model": "net-tokens", "inputs": {"cell": [9]}}, "inputs.cell", "[0] is not within 0 to 8"),
        ({"model": "net-tokens", "inputs": {"cell": [-(2**62)]}}, "inputs.cell", "not within"),
        ({"model": "net-tokens", "inputs": {"cell": [2**63]}}, "inputs.cell", "not within"),
        ({"model": "net-tokens", "inputs": {"cell": [1.5]}}, "inputs.cell", "no int32"),
        ({"model": MODEL, "inputs": {"observation": RIGHT}}, "inputs.observation", "unknown parameter"),
        ({"model": MODEL, "inputs": {"text": ["a"]}, "encoding_format": "base64"}, "encoding_format", "networks"),
    ],
)
def test_what_a_network_cannot_read_is_refused_by_name(
    http: httpx.Client, networks: None, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = http.post(PREDICT, json={"model": "net-mlp", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error


def test_numbers_that_json_has_not_are_refused(http: httpx.Client, networks: None) -> None:
    body = json.dumps({"model": "net-mlp", "inputs": {"observation": [[float("nan"), float("inf"), 0, 0]]}})
    answer = http.post(PREDICT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "no finite float32" in answer.json()["error"]["message"], answer.text


def test_a_network_in_use_is_not_deleted_and_no_text_is_asked_of_it(http: httpx.Client, networks: None) -> None:
    post(http, PREDICT, model="net-conv@1", inputs=listed(inputs_of(CONV, 1)))
    refused = http.delete("/v1/adapters/net-conv")
    assert refused.status_code == 409, refused.text
    refused = http.post("/v1/completions", json={"model": "net-conv", "prompt": "a"})
    assert refused.status_code == 400 and "net-conv@1 is a network" in refused.text


# -- policies


def softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def test_a_discrete_policy_says_exact_probabilities_and_values(http: httpx.Client, networks: None) -> None:
    inputs = inputs_of(MLP, 400)
    wanted = computed(MLP, weights_of(MLP, 1), inputs)
    fields = {"model_id": "net-mlp", "observations": inputs["observation"].tolist(), "seed": 3}
    answer = post(http, ACT, model="net-mlp", **fields)
    assert answer["policy_version"] == "net-mlp@2" and answer["new_hidden_states"] is None
    probs = softmax(wanted["action_logits"])
    np.testing.assert_allclose(answer["action_probs"], probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(answer["value_estimates"], wanted["value"][:, 0], rtol=1e-5, atol=1e-5)
    chosen = np.array(answer["actions"])
    own = np.log(probs[np.arange(400), chosen])
    np.testing.assert_allclose(answer["action_log_probs"], own, rtol=1e-5, atol=1e-5)
    assert abs(chosen.mean() - probs[:, 1].mean()) < 0.1, "drawn by its probabilities"
    assert post(http, ACT, model="net-mlp", **fields)["actions"] == answer["actions"], "the seed decides"
    greedy = post(http, ACT, model="net-mlp", **fields, deterministic=True, actions=["left", "right"])
    assert greedy["action_indices"] == probs.argmax(-1).tolist()
    assert greedy["actions"] == [["left", "right"][at] for at in greedy["action_indices"]]
    sharp = post(http, ACT, model="net-mlp", **fields, temperature=5e-324)
    assert sharp["action_indices"] == greedy["action_indices"] and set(sharp["action_log_probs"]) == {0.0}
    warm = post(http, ACT, model="net-mlp", **fields, temperature=2.0)
    np.testing.assert_allclose(warm["action_probs"], softmax(wanted["action_logits"] / 2), rtol=1e-5, atol=1e-5)


def test_a_gaussian_policy_says_exact_densities(http: httpx.Client, networks: None) -> None:
    inputs = inputs_of(GAUSSIAN, 300)
    wanted = computed(GAUSSIAN, weights_of(GAUSSIAN), inputs)
    mean, log_std = wanted["action_mean"], wanted["action_log_std"]
    answer = post(http, ACT, model="net-gaussian", observations=inputs["observation"].tolist(), seed=5)
    z = (np.array(answer["actions"]) - mean) / np.exp(log_std)
    own = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
    np.testing.assert_allclose(answer["action_log_probs"], own, rtol=1e-4, atol=1e-4)
    assert abs(z.mean()) < 0.15 and abs(z.std() - 1) < 0.1 and answer["value_estimates"] is None
    still = post(http, ACT, model="net-gaussian", observations=inputs["observation"].tolist(), deterministic=True)
    np.testing.assert_allclose(still["actions"], mean, rtol=1e-5, atol=1e-5)


def test_a_session_stays_with_its_version_of_a_split(http: httpx.Client, networks: None) -> None:
    assert upload(http, "net-lstm", weights_of(LSTM, 1), {"network": LSTM}).status_code == 200
    try:
        fields = {"model": "net-lstm@1:0.5,net-lstm@2:0.5", "observations": [[0.0, 1.0, 2.0, 3.0]]}
        for session in ("split-a", "split-b"):
            steps = [post(http, ACT, **fields, session_id=session, reset=at == 0) for at in range(8)]
            assert len({step["policy_version"] for step in steps}) == 1
    finally:
        assert http.post("/v1/adapters/net-lstm/rollback", json={"version": 1}).status_code == 200


@pytest.mark.parametrize("form", ["float", "base64"])
def test_a_recurrent_policy_goes_on_with_the_state_that_travels(http: httpx.Client, networks: None, form: str) -> None:
    steps = [inputs_of(LSTM, 3, seed=seed) for seed in range(4)]
    state: dict[str, Array] = {}
    shown: Any = None
    for inputs in steps:
        wanted = computed(LSTM, weights_of(LSTM), inputs | state)
        answer = post(
            http, ACT, model="net-lstm", observations=inputs["observation"].tolist(), hidden_states=shown,
            encoding_format=form,
        )  # fmt: skip
        np.testing.assert_allclose(answer["action_probs"], softmax(wanted["action_logits"]), rtol=1e-5, atol=1e-5)
        shown = answer["new_hidden_states"]
        state = {name: wanted[name] for name in ("memory.h", "memory.c")}
    found = shown["memory.h"] if form == "float" else tensor(shown["memory.h"])
    np.testing.assert_allclose(found, state["memory.h"], rtol=1e-5, atol=1e-5)
    whole = inputs_of(TOKENS, 2)
    answer = post(http, ACT, model="net-tokens", observations={"cell": whole["cell"].tolist()})
    assert list(answer["new_hidden_states"]) == ["memory.h"] and len(answer["actions"]) == 2
    answer = post(http, ACT, model=MODEL, adapter="net-tokens@1", observations=whole["cell"].tolist())
    assert (answer["model"], answer["policy_version"]) == (MODEL, "net-tokens@1")
    answer = http.post(ACT, json={"adapter": "net-tokens", "observations": whole["cell"].tolist()}).json()
    assert answer["model"] == "net-tokens", answer


STATE = {"memory.h": [[0.0] * 8], "memory.c": [[0.0] * 8]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"observations": []}, "observations", "at least 1"),
        ({"observations": ["a"]}, "observations", "no float32"),
        ({"observations": [[1.0]]}, "observations", "[1, 1]; [B, 4]"),
        ({"observations": {"x": [[1.0]]}}, "observations", "'observation' is missing"),
        ({"observations": {"observation": RIGHT, **STATE}}, "observations", "belongs to 'hidden_states'"),
        ({"hidden_states": {"x": 1}}, "hidden_states", "the network has memory.h, memory.c"),
        ({"hidden_states": {"memory.h": STATE["memory.h"]}}, "hidden_states", "'memory.c' is missing"),
        ({"hidden_states": {**STATE, "memory.c": [[0.0]]}}, "hidden_states.memory.c", "[B, 8]"),
        ({"hidden_states": {**STATE, "memory.c": [[0.0] * 8] * 2}}, "hidden_states.memory.c", "has 2 rows"),
        ({"hidden_states": [[0.0]]}, "hidden_states", "dictionary"),
        ({"actions": ["a", "b"]}, "actions", "3 actions, and 'actions' names 2"),
        ({"max_tokens": 3}, "max_tokens", "language models"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode", "language models"),
        ({"model": "net-mlp", "hidden_states": STATE}, "hidden_states", "the network has none"),
        ({"model": "net-conv"}, "model", "no policy"),
        ({"model": "net-gaussian", "observations": [[1, 2, 3]], "temperature": 0.5}, "temperature", "own spread"),
        ({"model": "net-gaussian", "observations": [[1, 2, 3]], "actions": ["a"]}, "actions", "no discrete"),
        ({"model": MODEL, "observations": [[0.5]]}, "observations[0]", ""),
        ({"model": MODEL, "observations": ["a"], "hidden_states": {}}, "hidden_states", "a language model"),
        ({"model": MODEL, "observations": ["a"], "encoding_format": "base64"}, "encoding_format", "language model"),
    ],
)
def test_what_is_no_step_of_the_policy_is_refused_by_name(
    http: httpx.Client, networks: None, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = http.post(ACT, json={"model": "net-lstm", "observations": RIGHT, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["param"].startswith(param), error


# -- sessions


def step(http: httpx.Client, seed: int, **fields: Any) -> httpx.Response:
    inputs = inputs_of(LSTM, 2, seed=seed)["observation"].tolist()
    return http.post(ACT, json={"model": "net-lstm", "observations": inputs, "session_id": "e-1", **fields})


def test_a_session_keeps_the_state_and_makes_each_step_once(http: httpx.Client, networks: None) -> None:
    assert step(http, 0, session_id="nobodys").json()["error"]["code"] == "session_not_found"
    for _ in range(2):  # it begins anew
        state: dict[str, Array] = {}
        for at in range(3):
            answer = step(http, at, **({"reset": True} if at == 0 else {"session_step": at}))
            assert answer.status_code == 200, answer.text
            wanted = computed(LSTM, weights_of(LSTM), inputs_of(LSTM, 2, seed=at) | state)
            found = answer.json()
            np.testing.assert_allclose(found["action_probs"], softmax(wanted["action_logits"]), rtol=1e-5, atol=1e-5)
            assert (found["session_id"], found["session_step"]) == ("e-1", at + 1)
            state = {name: wanted[name] for name in ("memory.h", "memory.c")}
    again = step(http, 2, session_step=2)
    assert (again.status_code, again.json()["error"]["param"]) == (409, "session_step"), again.text
    np.testing.assert_allclose(found["new_hidden_states"]["memory.h"], state["memory.h"], rtol=1e-5, atol=1e-5)


def test_of_steps_at_once_one_is_made(http: httpx.Client, networks: None) -> None:
    assert step(http, 0, reset=True).status_code == 200
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda at: step(http, at), range(8)))
    made = [answer.json()["session_step"] for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} <= {200, 409} and sorted(made) == list(range(2, 2 + len(made)))
    assert step(http, 9).json()["session_step"] == 2 + len(made)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"session_id": None, "reset": True}, 400, "session_id"),
        ({"session_id": "a b"}, 400, "session_id"),
        ({"session_id": "{x}*"}, 400, "session_id"),
        ({"hidden_states": STATE}, 400, "hidden_states"),
        ({"reset": True, "session_step": 1}, 400, "session_step"),
        ({"session_step": 0}, 400, "session_step"),
        ({"observations": RIGHT}, 400, "session_id"),  # one row, and the session has two
        ({"model": "net-mlp"}, 400, "session_id"),
        ({"model": "net-tokens", "observations": [1, 2]}, 409, "session_id"),
        ({"model": MODEL, "observations": ["a"]}, 400, "session_id"),
    ],
)
def test_what_is_no_step_of_the_session_is_refused_by_name(
    http: httpx.Client, networks: None, fields: dict[str, Any], status: int, param: str
) -> None:
    assert step(http, 0, reset=True).json()["session_step"] == 1
    answer = step(http, 1, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert step(http, 1, session_step=1).status_code == 200, "and the session is where it was"
