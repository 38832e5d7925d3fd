"""Classifications, actions and predictions, held against what the other endpoints say of the same model."""

import math
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.rings import MODEL, Ring
from tests.waiting import HANG_S

LABELS = ["sum", "a greeting", "7"]


@pytest.fixture
def http(served: Ring):
    with httpx.Client(base_url=served.url, timeout=HANG_S) as made:
        yield made


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(http: httpx.Client, text: str) -> list[int]:
    found: list[int] = post(http, "/tokenize", prompt=text)["tokens"]
    return found


def log_probability(http: httpx.Client, prompt: str, continuation: str) -> float:
    """By the echo of /v1/completions."""
    before, after = ids(http, prompt), ids(http, continuation)
    body = {"prompt": before + after, "max_tokens": 0, "echo": True, "logprobs": 0}
    scored = post(http, "/v1/completions", **body)["choices"][0]["logprobs"]["token_logprobs"]
    return sum(scored[len(before) :])


def distribution(http: httpx.Client, prompt: str, names: list[str]) -> np.ndarray:
    scores = np.array([log_probability(http, prompt, name) for name in names])
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def test_a_classification_is_the_models_distribution_over_the_labels(http: httpx.Client) -> None:
    texts = ["12+35=47", "hello there"]
    answer = post(http, "/v1/classifications", input=texts, labels=LABELS, template="{input} is ")
    for at, (text, each) in enumerate(zip(texts, answer["data"], strict=True)):
        np.testing.assert_allclose(each["probs"], distribution(http, f"{text} is ", LABELS), rtol=1e-3, atol=1e-5)
        assert each["index"] == at and each["num_classes"] == 3
        assert each["label"] == LABELS[int(np.argmax(each["probs"]))]
    assert answer["usage"]["prompt_tokens"] == sum(len(ids(http, f"{text} is ")) for text in texts)


def test_a_discrete_action_is_drawn_from_the_models_distribution(http: httpx.Client) -> None:
    actions, observation = ["4", "5", "12"], "2+2="
    wanted = distribution(http, observation, actions)
    fields: dict[str, Any] = {"observations": [observation] * 200, "actions": actions, "seed": 5}
    answer = post(http, "/v1/rl/act", **fields)
    np.testing.assert_allclose(answer["action_probs"][0], wanted, rtol=1e-3, atol=1e-5)
    counts = np.bincount(answer["action_indices"], minlength=3) / 200
    np.testing.assert_allclose(counts, wanted, atol=0.15)
    for name, at, log_prob in zip(answer["actions"], answer["action_indices"], answer["action_log_probs"], strict=True):
        assert name == actions[at] and log_prob == pytest.approx(math.log(wanted[at]), abs=1e-2)
    assert post(http, "/v1/rl/rollout", **fields)["actions"] == answer["actions"], "its other name"
    greedy = post(http, "/v1/rl/act", **fields | {"deterministic": True})
    assert set(greedy["action_indices"]) == {int(np.argmax(wanted))}


def test_an_action_in_words_is_a_completion_with_its_log_probability(http: httpx.Client) -> None:
    chat = [{"role": "user", "content": "hello"}]
    answer = post(http, "/v1/rl/act", observations=["12+35=", chat], deterministic=True, max_tokens=12)
    plain = post(http, "/v1/completions", prompt="12+35=", temperature=0, max_tokens=12, logprobs=0)["choices"][0]
    said = post(http, "/v1/chat/completions", messages=chat, temperature=0, max_tokens=12)["choices"][0]
    assert answer["actions"] == [plain["text"], said["message"]["content"]]
    assert answer["action_log_probs"][0] == pytest.approx(sum(plain["logprobs"]["token_logprobs"]), abs=1e-2)
    assert answer["policy_version"] == "" and answer["value_estimates"] is None
    drawn = post(http, "/v1/rl/act", observations=["12+35="] * 6, temperature=2.0, seed=1, max_tokens=12)
    assert len(set(drawn["actions"])) > 1


def test_a_prediction_is_what_the_other_endpoints_say(http: httpx.Client) -> None:
    answer = post(
        http, "/v1/predict", inputs={"text": ["hello", "12+35="]}, top_k=3,
        outputs=["embedding", "next_token_ids", "next_token_log_probs"],
    )["outputs"]  # fmt: skip
    raw = post(http, "/v1/embeddings", input=["hello", "12+35="], pooling="last", normalize=False)["data"]
    np.testing.assert_allclose(answer["embedding"]["data"], [each["embedding"] for each in raw], rtol=1e-3, atol=1e-4)
    assert answer["embedding"]["shape"] == [2, len(raw[0]["embedding"])]
    logprobs = post(http, "/v1/completions", prompt="12+35=", temperature=0, max_tokens=1, logprobs=3)
    tops = list(logprobs["choices"][0]["logprobs"]["top_logprobs"][0].values())
    np.testing.assert_allclose(sorted(answer["next_token_log_probs"]["data"][1])[::-1], sorted(tops)[::-1], atol=1e-2)
    same = post(http, "/v1/predict", inputs={"input_ids": [ids(http, "12+35=")]}, top_k=3)["outputs"]
    assert same["next_token_ids"]["data"] == answer["next_token_ids"]["data"][1:]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/classifications", {"input": "a", "labels": ["one"]}, "labels"),
        ("/v1/classifications", {"input": "a", "labels": ["x", "x"]}, "labels"),
        ("/v1/classifications", {"input": "a", "labels": ["x", "y"], "template": "no place"}, "template"),
        ("/v1/classifications", {"input": "a " * 5000, "labels": ["x", "y"]}, "input"),
        ("/v1/rl/act", {"observations": []}, "observations"),
        ("/v1/rl/act", {"observations": ["a"], "hidden_states": [[0.0]]}, "hidden_states"),
        ("/v1/rl/act", {"observations": ["a"], "model_id": "other"}, "model_id"),
        ("/v1/rl/act", {"observations": ["a"], "actions": ["x"], "max_tokens": 3}, "max_tokens"),
        ("/v1/predict", {"inputs": {}}, "inputs"),
        ("/v1/predict", {"inputs": {"image": []}}, "inputs.image"),
        ("/v1/predict", {"inputs": {"text": ["a"]}, "outputs": ["value"]}, "outputs[0]"),
    ],
)
def test_what_cannot_be_is_refused_by_name(http: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    answer = http.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
