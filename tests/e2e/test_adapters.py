"""Adapters on a real ring: uploaded, served side by side, loaded under running streams, rolled back, refused."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from api.cli.client import InferenceClient
from api.cli.http import RequestFailedError
from tests.e2e.rings import MODEL, Ring, ring
from tests.unit.adapter_files import Array, mlx_config, peft_config, peft_tensors, write
from tests.waiting import HANG_S, wait_until

HELLO = [{"role": "user", "content": "hello"}]
RANK = 4
SHAPES = {"self_attn.q_proj": (128, 128), "self_attn.v_proj": (128, 64), "mlp.down_proj": (384, 128)}
CONFIG = mlx_config(num_layers=3, lora_parameters={"rank": RANK, "scale": 2.0, "dropout": 0.0})


def weights(seed: int) -> dict[str, Array]:
    """A LoRA of models/tiny, strong enough to change greedy answers."""
    draw = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for layer in range(3):
        for path, (inputs, outputs) in SHAPES.items():
            module = f"model.layers.{layer}.{path}"
            tensors[f"{module}.lora_a"] = draw.standard_normal((inputs, RANK)).astype(np.float32) * 0.1
            tensors[f"{module}.lora_b"] = draw.standard_normal((RANK, outputs)).astype(np.float32) * 0.3
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write(root / "allowed" / "lora", CONFIG, weights(9))
    write(root / "outside", CONFIG, weights(9))
    (root / "allowed" / "link").symlink_to(root / "outside")
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("ring"), "--adapter-dirs", str(folder / "allowed")) as started:
        yield started


@pytest.fixture
def http(server: Ring) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=HANG_S) as client:
        yield client


def upload(http: httpx.Client, name: str, tensors: dict[str, Array], config: Any = CONFIG) -> httpx.Response:
    files = {
        "adapter": ("adapters.safetensors", save(tensors)),
        "config": ("adapter_config.json", json.dumps(config).encode()),
    }
    return http.post("/upload_adapter", data={"name": name}, files=files)


def chat_body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": HELLO, "temperature": 0, "max_tokens": 24, **fields}


def answer(http: httpx.Client, model: str) -> str:
    response = http.post("/v1/chat/completions", json=chat_body(model))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def test_base_and_two_versions_answer_side_by_side(server: Ring, http: httpx.Client) -> None:
    for version, seed in ((1, 1), (2, 2)):
        response = upload(http, "side", weights(seed))
        assert (response.status_code, response.json()["policy_version"]) == (200, version), response.text

    models = [MODEL, "side@1", "side@2"]
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client:
        bodies = [chat_body(model, return_weight_versions=True) for model in models * 3]
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
    choices = [reply.json()["choices"][0] for reply in replies]
    texts = [choice["message"]["content"] for choice in choices]
    assert texts[:3] == texts[3:6] == texts[6:]
    assert len(set(texts[:3])) == 3
    assert [{span["version"] for span in choice["weight_versions"]} for choice in choices[:3]] == [
        {""}, {"side@1"}, {"side@2"}
    ]  # fmt: skip
    assert [answer(http, model) for model in models] == texts[:3]
    assert answer(http, "side") == texts[2]


async def test_a_stream_follows_a_hot_load_and_a_pinned_one_does_not(server: Ring, http: httpx.Client) -> None:
    upload(http, "hot", weights(3))
    answer(http, "hot")
    begun = {"follow": asyncio.Event(), "pin": asyncio.Event()}
    spans: dict[str, list[tuple[str, int, int]]] = {"follow": [], "pin": []}

    async def read(client: httpx.AsyncClient, policy: str) -> None:
        body = chat_body(
            "hot", adapter_policy=policy, max_tokens=1500, ignore_eos=True, stream=True, return_weight_versions=True
        )
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    spans[policy] += [(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions", [])]
                if spans[policy]:
                    begun[policy].set()

    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client, asyncio.TaskGroup() as streams:
        for policy in begun:
            streams.create_task(read(client, policy))
        for event in begun.values():
            await event.wait()
        assert (await asyncio.to_thread(upload, http, "hot", weights(4))).json()["policy_version"] == 2
    for policy, expected in (("follow", ["hot@1", "hot@2"]), ("pin", ["hot@1"])):
        assert list(dict.fromkeys(version for version, _, _ in spans[policy])) == expected
        assert [start for _, start, _ in spans[policy]] == [0, *(end for _, _, end in spans[policy][:-1])]
        assert spans[policy][-1][2] == 1500


def test_models_lists_an_adapter_under_its_base(http: httpx.Client) -> None:
    upload(http, "listed", weights(1))
    listed = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert (listed["listed"]["parent"], listed["listed"]["version"]) == (MODEL, 1)


def test_a_rollback_brings_the_old_answers_back(server: Ring, http: httpx.Client) -> None:
    upload(http, "back", weights(5))
    before = answer(http, "back")
    upload(http, "back", weights(6))
    assert answer(http, "back") != before
    assert http.post("/v1/adapters/back/rollback").json()["policy_version"] == 1
    assert answer(http, "back") == before
    described = http.get("/v1/adapters/back").json()
    assert (described["latest"], [move["version"] for move in described["history"]]) == (1, [1, 2, 1])
    (worker,) = server.workers()
    asyncio.run(wait_until(lambda: worker.id in http.get("/v1/adapters/back").json()["acks"]))


def test_a_peft_adapter_answers_as_its_mlx_twin(http: httpx.Client) -> None:
    upload(http, "twin", weights(7))
    modules = [path.rpartition(".")[2] for path in SHAPES]
    peft = peft_config(r=RANK, lora_alpha=2 * RANK, target_modules=modules)
    assert upload(http, "twin", peft_tensors(weights(7)), peft).json()["policy_version"] == 2
    assert answer(http, "twin@1") == answer(http, "twin@2") != answer(http, MODEL)


def test_a_bad_upload_leaves_the_latest_version_in_place(http: httpx.Client) -> None:
    upload(http, "strict", weights(8))
    before = answer(http, "strict")
    broken, foreign = weights(8), {key.replace("layers.2", "layers.7"): value for key, value in weights(8).items()}
    broken["model.layers.0.self_attn.q_proj.lora_b"][0, 0] = np.nan
    for tensors, reason in ((broken, "not finite"), (foreign, "no such module")):
        refused = upload(http, "strict", tensors)
        assert refused.status_code == 400
        assert reason in refused.json()["error"]["message"]
    assert http.get("/v1/adapters/strict").json()["latest"] == 1
    assert answer(http, "strict") == before


def test_only_configured_folders_are_read(http: httpx.Client, folder: Path) -> None:
    for path in (folder / "outside", folder / "allowed" / "link", folder / "allowed" / ".." / "outside"):
        refused = http.post("/load_adapter", json={"adapter_path": str(path)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_rejected")
    assert http.post("/generate", json={"prompt": "a", "max_tokens": 1}).json()["policy_version"] == 0
    loaded = http.post("/load_adapter", json={"adapter_path": str(folder / "allowed" / "lora")}).json()
    assert (loaded["status"], loaded["policy_version"]) == ("success", 1)
    generated = http.post("/generate", json={"prompt": "a", "max_tokens": 4, "logprobs": 1}).json()
    assert (generated["policy_version"], len(generated["logprobs"])) == (1, len(generated["completion_ids"]))
    assert http.post("/generate", json={"prompt": "a", "policy_version": 2}).status_code == 409


async def test_the_client_generates_and_is_refused_a_folder_outside(server: Ring) -> None:
    async with InferenceClient(server.url, patience_s=5) as client:
        made = await client.generate("hello", model="tiny", max_tokens=8, temperature=0, step_id=7)
        assert made.policy_version == 0
        assert made.step_id == 7
        assert made.logprobs is not None
        assert len(made.logprobs) == len(made.completion_ids) <= 8
        with pytest.raises(RequestFailedError, match="adapter"):
            await client.load_adapter("/etc")
