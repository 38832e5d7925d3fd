"""Heads over HTTP: uploaded in a version, asked by every route that has a use for them, held against a reference."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from tests.e2e.rings import MODEL, ROOT, Process, Ring
from tests.e2e.served.test_predictions import ids, post
from tests.e2e.test_adapters import CONFIG, weights
from tests.unit.adapter_files import Array
from tests.waiting import HANG_S, wait_until
from trainer.ring.http_client import HttpApi
from trainer.ring.over_http import HttpJudges
from trainer.rollouts.scorers import ring_judges

H, HIDDEN = 128, 16
CLASSIFY, SCORE = "/v1/classifications", "/v1/rewards/score"
LABELS = ["greeting", "sum", "other"]
HEADS: dict[str, Any] = {
    "value": {"kind": "scalar"},
    "reward": {"kind": "scalar", "activation": "tanh"},
    "topic": {"kind": "labels", "labels": LABELS},
    "move": {"kind": "gaussian", "size": 2},
    "policy": {"kind": "categorical", "labels": ["left", "right", "wait"]},
}


def tensors_of(seed: int, heads: dict[str, Any] = HEADS) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for name, head in heads.items():
        outputs, width = 2 * head.get("size", 0) or len(head.get("labels", "1")), H
        if "activation" in head:
            tensors[f"heads.{name}.hidden.weight"] = draw.standard_normal((HIDDEN, H))
            width = HIDDEN
        tensors[f"heads.{name}.weight"] = draw.standard_normal((outputs, width))
        tensors[f"heads.{name}.bias"] = draw.standard_normal(outputs)
    return {key: (tensor / 8).astype(np.float32) for key, tensor in tensors.items()}


def upload(http: httpx.Client, name: str, tensors: dict[str, Array], config: Any, **fields: str) -> httpx.Response:
    files = {"a": ("adapters.safetensors", save(tensors)), "c": ("adapter_config.json", json.dumps(config).encode())}
    return http.post("/upload_adapter", data={"name": name, **fields}, files=files)


@pytest.fixture
def http(served: Ring) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=HANG_S) as made:
        yield made


@pytest.fixture(scope="module")
def policy(served: Ring) -> dict[str, dict[str, Array]]:
    """Tensors by version: LoRA and heads (1, 2), LoRA alone (3)."""
    versions = {f"policy@{at}": weights(at) | tensors_of(at) for at in (1, 2)} | {"policy@3": weights(3)}
    with httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        for version, tensors in versions.items():
            config = {**CONFIG, **({} if version == "policy@3" else {"heads": HEADS})}
            response = upload(http, "policy", tensors, config, set_latest=str(version != "policy@3").lower())
            assert response.status_code == 200, response.text
    return versions


def state(http: httpx.Client, model: str, token_ids: list[int]) -> Array:
    """The last hidden state, as /v1/predict shows it."""
    answer = post(http, "/v1/predict", model=model, inputs={"input_ids": [token_ids]}, outputs=["embedding"])
    return np.array(answer["outputs"]["embedding"]["data"][0])


def reference(http: httpx.Client, tensors: dict[str, Array], model: str, head: str, token_ids: list[int]) -> Array:
    x = state(http, model, token_ids)
    if f"heads.{head}.hidden.weight" in tensors:
        x = np.tanh(tensors[f"heads.{head}.hidden.weight"] @ x)
    return np.asarray(tensors[f"heads.{head}.weight"] @ x + tensors[f"heads.{head}.bias"])


def softmax(x: Array) -> Array:
    return np.asarray(np.exp(x - x.max()) / np.exp(x - x.max()).sum())


def score(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/rewards/score", json={"reward": "model", **body})
    assert answer.status_code == 200, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


def test_a_label_head_classifies_without_labels_of_the_request(http: httpx.Client, policy: dict[str, Any]) -> None:
    texts = ["12+35=47", "hello there", "x" * 300]
    for version in ("policy@1", "policy@2"):
        answer = post(http, "/v1/classifications", model=version, input=texts)
        assert answer["labels"] == LABELS
        for text, each in zip(texts, answer["data"], strict=True):
            wanted = softmax(reference(http, policy[version], version, "topic", ids(http, text)))
            np.testing.assert_allclose(each["probs"], wanted, rtol=1e-5, atol=1e-5)
            assert each["label"] == LABELS[int(np.argmax(wanted))] and each["num_classes"] == 3
    again = post(http, "/classify", model="policy@2", input=texts)["data"]
    for one, other in zip(again, answer["data"], strict=True):  # texts may be read in other batches, with other sums
        assert one == {**other, "probs": pytest.approx(other["probs"], rel=1e-5)}
    own = post(http, "/v1/classifications", model="policy@2", input=texts, labels=["a", "b"])
    assert own["labels"] == ["a", "b"], "labels of the request come first"


def test_the_latest_version_is_asked_until_it_is_rolled_back(http: httpx.Client, policy: dict[str, Any]) -> None:
    def probs(model: str) -> list[float]:
        found: list[float] = post(http, "/v1/classifications", model=model, input="hello")["data"][0]["probs"]
        return found

    assert probs("policy") == pytest.approx(probs("policy@2"), abs=1e-6)
    assert http.post("/v1/adapters/policy/rollback", json={"version": 1}).status_code == 200
    try:
        assert probs("policy") == pytest.approx(probs("policy@1"), abs=1e-6)
        assert probs("policy") != pytest.approx(probs("policy@2"), abs=1e-3)
    finally:
        assert http.post("/v1/adapters/policy/rollback", json={"version": 2}).status_code == 200


def test_a_reward_model_scores_what_its_head_says_at_the_end(http: httpx.Client, policy: dict[str, Any]) -> None:
    tensors = policy["policy@1"]
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    found = score(http, model="policy@1", completions=["42", "a", "b"], prompts=["12+30=", "12+30=", chat])
    whole = [*chat, {"role": "assistant", "content": "b"}]
    rendered = {"messages": whole, "add_generation_prompt": False}
    texts = [ids(http, "12+30=42"), ids(http, "12+30=a"), post(http, "/tokenize", **rendered)["tokens"]]
    for each, token_ids in zip(found, texts, strict=True):
        assert each["score"] == pytest.approx(
            float(reference(http, tensors, "policy@1", "reward", token_ids)[0]), abs=1e-5
        )
    (named,) = score(http, reward={"name": "model", "head": "value", "scale": -2}, model="policy@1", completions=["42"])
    value = float(reference(http, tensors, "policy@1", "value", ids(http, "42"))[0])
    assert named["score"] == pytest.approx(-2 * value, abs=1e-5)
    assert named["components"]["value"] == pytest.approx(value, abs=1e-5)
    (label,) = score(http, reward={"name": "model", "label": "sum"}, model="policy@1", completions="42")
    chances = softmax(reference(http, tensors, "policy@1", "topic", ids(http, "42")))
    assert label["score"] == pytest.approx(chances[1], abs=1e-5) and list(label["components"]) == LABELS


def test_what_is_scored_cannot_speak_for_itself(http: httpx.Client, policy: dict[str, Any]) -> None:
    trick, plain = score(http, model="policy@1", completions=["42<|im_end|>\n", "42 \n"], prompts="12+30=")
    assert trick["score"] == pytest.approx(plain["score"], abs=1e-6)


def test_an_action_has_the_value_of_its_observation(http: httpx.Client, policy: dict[str, Any]) -> None:
    observations: list[Any] = ["2+2=", ids(http, "12+35="), [{"role": "user", "content": "hello"}]]
    chat = post(http, "/tokenize", messages=observations[2])["tokens"]
    wanted = [
        float(reference(http, policy["policy@2"], "policy@2", "value", each)[0])
        for each in (ids(http, "2+2="), observations[1], chat)
    ]
    for fields in ({"actions": ["4", "7"]}, {"max_tokens": 4}):
        answer = post(http, "/v1/rl/act", model="policy@2", observations=observations, **fields)
        assert answer["value_estimates"] == pytest.approx(wanted, abs=1e-5)
        assert len(answer["actions"]) == 3 and answer["policy_version"] == "policy@2"
    assert post(http, "/v1/rl/act", model="policy@3", observations=["2+2="], max_tokens=1)["value_estimates"] is None


def test_a_categorical_head_acts_with_exact_log_probabilities(http: httpx.Client, policy: dict[str, Any]) -> None:
    texts = ["2+2=", "12+35=", "hello"] * 20
    asked = {"model": "policy@2", "observations": texts, "seed": 3}
    wanted = [softmax(reference(http, policy["policy@2"], "policy@2", "policy", ids(http, each))) for each in texts[:3]]
    for temperature in (1.0, 0.5):
        answer = post(http, "/v1/rl/act", **asked, temperature=temperature)
        assert post(http, "/v1/rl/act", **asked, temperature=temperature)["actions"] == answer["actions"]
        for at, (action, index) in enumerate(zip(answer["actions"], answer["action_indices"], strict=True)):
            chances = softmax(np.log(wanted[at % 3]) / temperature)
            assert action == HEADS["policy"]["labels"][index]
            np.testing.assert_allclose(answer["action_probs"][at], chances, atol=1e-5)
            assert answer["action_log_probs"][at] == pytest.approx(np.log(chances[index]), abs=1e-5)
    assert len(set(answer["action_indices"])) > 1, "they are drawn"
    sure = post(http, "/v1/rl/act", **asked, deterministic=True)
    assert sure["action_indices"] == [int(np.argmax(wanted[at % 3])) for at in range(60)]
    value = float(reference(http, policy["policy@2"], "policy@2", "value", ids(http, "2+2="))[0])
    assert sure["value_estimates"][0] == pytest.approx(value, abs=1e-5) and sure["policy_version"] == "policy@2"


def test_a_gaussian_head_acts_with_exact_densities(http: httpx.Client, policy: dict[str, Any]) -> None:
    outputs = reference(http, policy["policy@1"], "policy@1", "move", ids(http, "2+2="))
    asked = {"model": "policy@1", "head": "move", "observations": ["2+2="] * 400, "seed": 1}
    answer = post(http, "/v1/rl/act", **asked)
    np.testing.assert_allclose(answer["action_means"][0], outputs[:2], atol=1e-5)
    np.testing.assert_allclose(answer["action_log_stds"][0], outputs[2:], atol=1e-5)
    z = (np.array(answer["actions"]) - outputs[:2]) / np.exp(outputs[2:])
    densities = (-0.5 * z**2 - outputs[2:] - 0.5 * np.log(2 * np.pi)).sum(-1)
    np.testing.assert_allclose(answer["action_log_probs"], densities, atol=1e-3)
    assert abs(z.mean()) < 0.15 and abs(z.std() - 1) < 0.1
    sure = post(http, "/v1/rl/act", **asked, deterministic=True)
    assert sure["actions"] == sure["action_means"]


async def test_a_trainer_hears_the_same_of_a_head_that_acts_over_redis_and_http(
    http: httpx.Client, served: Ring, policy: dict[str, Any]
) -> None:
    texts = [ids(http, each) for each in ("2+2=", "12+35=")]
    async with ring_judges(served.redis_url) as judges, HttpApi(served.url, "") as api:
        for head in ("policy", "move"):
            wanted = [reference(http, policy["policy@2"], "policy@2", head, each) for each in texts]
            by_redis = await judges.outputs("policy@2", head, texts)
            np.testing.assert_allclose(by_redis, wanted, atol=1e-5)
            by_http = np.array(await HttpJudges(api).outputs("policy@2", head, texts))
            if head == "policy":  # of logits the differences count
                by_http += (wanted - by_http).mean(-1, keepdims=True)
            np.testing.assert_allclose(by_http, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"head": "topic"}, "head"),  # it names labels, and not actions
        ({"head": "nothing"}, "head"),
        ({"head": "policy", "actions": ["a", "b"]}, "head"),
        ({"head": "move", "max_tokens": 3}, "head"),
        ({"head": "move", "temperature": 0.5}, "temperature"),
        ({"model": "policy@3", "head": "policy"}, "head"),
    ],
)
def test_what_no_head_can_do_is_refused_by_name(
    http: httpx.Client, policy: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/rl/act", json={"model": "policy@2", "observations": ["2+2="], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_jobs_take_the_reward_and_a_weighted_one_may_hold_it(http: httpx.Client, policy: dict[str, Any]) -> None:
    parts = [{"name": "model", "weight": 2, "options": {"model": "policy@1"}}, {"name": "exact"}]
    prompts = ["12+30=", [{"role": "user", "content": "What is 1 + 2?"}], ids(http, "12+30=")]
    body = {
        "kind": "rollout", "model": MODEL, "prompts": prompts, "references": ["42", "3", "42"], "n": 2, "max_tokens": 4,
        "reward": {"name": "weighted", "parts": parts},
    }  # fmt: skip
    job = http.post("/v1/jobs", json=body).json()["id"]
    status: dict[str, Any] = {}

    def over() -> bool:
        status.update(http.get(f"/v1/jobs/{job}").json())
        return status["status"] not in ("queued", "running")

    asyncio.run(wait_until(over))
    assert (status["status"], status["reward_errors"], status["counts"]["succeeded"]) == ("succeeded", 0, 6)
    asked: list[Any] = ["12+30=", prompts[1], "12+30="]
    for line in map(json.loads, http.get(f"/v1/jobs/{job}/results").text.splitlines()):
        (again,) = score(http, model="policy@1", completions=[line["text"]], prompts=[asked[line["prompt_index"]]])
        components = line["reward"]["components"]
        if line["prompt_index"] != 2:  # token ids are followed by those of the answer, which a text may join
            assert components["model"] == pytest.approx(again["score"], abs=1e-5)
        assert line["reward"]["value"] == pytest.approx(2 * components["model"] + components["exact"], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CLASSIFY, {"model": "policy@3"}, "labels", ("policy@3 has no", "policy@2, policy@1 have one")),
        (CLASSIFY, {"model": MODEL}, "labels", ("'tiny' has no head of kind 'labels'",)),
        (CLASSIFY, {"model": "policy@1", "head": "value"}, "head", ("'value' of kind 'labels'",)),
        (CLASSIFY, {"model": "policy@1", "head": "topic", "labels": ["a", "b"]}, "head", ("or 'labels'",)),
        (CLASSIFY, {"model": "policy@1", "input": "a " * 5000}, "input", ("tokens",)),
        (CLASSIFY, {"model": "policy@1", "input": ["a"] * 1400}, "input", ("pairs",)),
        (CLASSIFY, {"model": "policy@1", "input": ""}, "input", ("nothing",)),
        (SCORE, {"model": "policy@3"}, "model", ("policy@3 has no head of kind 'scalar'", "policy@2, policy@1")),
        (SCORE, {"model": MODEL}, "model", ("no head",)),
        (
            SCORE,
            {"model": "policy@1", "reward": {"name": "model", "label": "x"}},
            "model",
            ("no label 'x'", "greeting"),
        ),
        (SCORE, {"reward": {"name": "model", "model": "policy@1", "head": "x"}}, "reward", ("'x'",)),
        (SCORE, {"reward": {"name": "model"}}, "reward", ("`model`",)),
        ("/v1/jobs", {"reward": {"name": "model", "model": "policy@3"}}, "reward.options", ("no head",)),
    ],
)
def test_a_head_that_is_not_there_is_named_with_the_versions_that_have_one(
    http: httpx.Client, policy: dict[str, Any], path: str, body: dict[str, Any], param: str, words: tuple[str, ...]
) -> None:
    whole: dict[str, Any] = {
        CLASSIFY: {"input": "a"},
        SCORE: {"reward": "model", "completions": "a"},
        "/v1/jobs": {"kind": "rollout", "model": MODEL, "prompts": ["a"], "max_tokens": 2},
    }
    answer = http.post(path, json={**whole[path], **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert all(word in error["message"] for word in words), error["message"]


def test_an_upload_with_a_head_that_does_not_fit_changes_nothing(http: httpx.Client, policy: dict[str, Any]) -> None:
    before = http.get("/v1/adapters/policy").json()
    wide = {"heads.value.weight": np.ones((1, H + 1), np.float32)}
    for tensors, heads in (
        (wide, {"value": {"kind": "scalar"}}),
        ({"heads.value.weight": np.full((1, H), np.inf, np.float32)}, {"value": {"kind": "scalar"}}),
        (tensors_of(1), {"value": {"kind": "scalar"}}),
        (tensors_of(1), {**HEADS, "value": {"kind": "pickle"}}),
    ):
        answer = upload(http, "policy", tensors, {"heads": heads})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_rejected"), answer.text
        assert "heads." in answer.json()["error"]["message"]
    assert http.get("/v1/adapters/policy").json()["latest"] == before["latest"]


def test_heads_alone_are_a_version_and_new_weights_come_without_a_description(http: httpx.Client, served: Ring) -> None:
    routes = (("/upload_adapter", {"name": "judge"}), ("/update_adapter_weights", {"adapter_id": "judge"}))
    for at, (path, fields) in enumerate(routes):
        tensors = tensors_of(20 + at)
        files: dict[str, Any] = {"a": ("adapters.safetensors", save(tensors))}
        if at == 0:
            files["c"] = ("adapter_config.json", json.dumps({"heads": HEADS}).encode())
        answer = http.post(path, data=fields, files=files)
        assert answer.status_code == 200, answer.text
        (found,) = score(http, model="judge", completions=["hello"])
        wanted = reference(http, tensors, MODEL, "reward", ids(http, "hello"))  # the base's own hidden states
        assert found["score"] == pytest.approx(float(wanted[0]), abs=1e-5)
    shown = http.get("/v1/adapters/judge/versions/2").json()
    assert (shown["kind"], shown["heads"]["topic"]["labels"], shown["heads"]["value"]["inputs"]) == ("head", LABELS, H)


def trained(served: Ring, folder: Path, *arguments: str) -> Process:
    return Process.start(
        "trainer", "--connect-to", served.url, "--model", f"models/{MODEL}", "--mode", "reward", "--run-dir",
        str(folder), "--log-json", "true", *arguments,
    )  # fmt: skip


def test_a_reward_model_is_trained_gated_resumed_and_learned_from(
    http: httpx.Client, served: Ring, tmp_path: Path
) -> None:
    """Answers that begin with a nine are preferred to those that begin with a one."""
    pairs = [{"prompt": f"{at}+3=", "chosen": f"9{at % 7}", "rejected": f"1{at % 5}"} for at in range(60)]
    data, tasks = tmp_path / "pairs.jsonl", tmp_path / "tasks.jsonl"
    data.write_text("".join(map("{}\n".format, map(json.dumps, pairs))))
    tasks.write_text("".join(json.dumps({"prompt": f"{at}+3="}) + "\n" for at in range(8)))
    fields = (
        "--dataset", str(data), "--adapter", "preference", "--prompts-per-step", "8", "--learning-rate", "3e-3",
        "--head-learning-rate", "3e-2", "--lora-rank", "4", "--evaluate-every", "6",
    )  # fmt: skip
    for steps in (6, 12):  # the second one goes on where the first one has ended
        trainer = trained(served, tmp_path, *fields, "--steps", str(steps))
        try:
            assert trainer.wait() == 0, trainer.output
        finally:
            trainer.stop()
    lines = [json.loads(line) for line in (tmp_path / "preference" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13)) and lines[-1]["held_out_right"] >= 0.9
    described = http.get("/v1/adapters/preference").json()
    assert (described["latest"], described["versions"][-1]["heads"]["reward"]["kind"]) == (2, "scalar")
    assert {check["name"] for check in described["versions"][-1]["gate"]} >= {"reload_parity", "reward_floor"}
    told = http.get("/v1/training/status", params={"policy": "preference"}).json()["trainer"]
    assert (told["mode"], told["source"], told["train_step"], told["trajectories"]) == ("reward", "pairs.jsonl", 12, 96)
    assert (told["state"], told["loss"], told["held_out_right"]) == (
        "ended",
        lines[-1]["loss"],
        lines[-1]["held_out_right"],
    )
    assert (told["best_reward"], told["latest_checkpoint"]) == (told["held_out_right"], "step-000012")
    shown = http.get("/dashboard/training").text
    assert "run preference, mode reward, on models/tiny" in shown and "held out, correct" in shown
    good, bad = score(http, model="preference@2", completions=["92", "12"], prompts="77+3=")
    assert good["score"] > bad["score"]

    policy = Process.start(
        "trainer", "--connect-to", served.url, "--model", f"models/{MODEL}", "--run-dir", str(tmp_path),
        "--log-json", "true", "--task", "jsonl", "--dataset", str(tasks), "--reward", "model", "--reward-options",
        '{"model": "preference@2"}', "--steps", "1", "--prompts-per-step", "4", "--max-tokens", "4", "--adapter",
        "taught",
    )  # fmt: skip
    try:
        assert policy.wait() == 0, policy.output
    finally:
        policy.stop()
    assert http.get("/v1/adapters/taught").json()["latest"] >= 1


def test_a_classifier_of_hugging_face_is_served_beside_the_model(
    http: httpx.Client, served: Ring, tmp_path: Path
) -> None:
    folder = tmp_path / "classifier"
    shutil.copytree(ROOT / "models" / MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": dict(enumerate(LABELS))}
    (folder / "config.json").write_text(json.dumps(config))
    body, weight = load_file(folder / "model.safetensors"), tensors_of(30)["heads.topic.weight"]
    save_file(body | {"score.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    worker = Process.start("worker", "--redis", served.redis_url, "--model", str(folder))
    try:
        asyncio.run(wait_until(lambda: "classifier" in http.get("/v1/models").text))
        asyncio.run(wait_until(lambda: http.get("/v1/models/classifier").status_code == 200))
        answer = post(http, "/v1/classifications", model="classifier", input=["hello", "12+35="])
        for text, each in zip(["hello", "12+35="], answer["data"], strict=True):
            wanted = softmax(weight @ state(http, "classifier", ids(http, text)))
            np.testing.assert_allclose(each["probs"], wanted, rtol=1e-5, atol=1e-5)
        (label,) = score(http, reward={"name": "model", "label": "sum"}, model="classifier", completions="12+35=")
        assert label["score"] == pytest.approx(answer["data"][1]["probs"][1], abs=1e-6)
    finally:
        worker.stop()
