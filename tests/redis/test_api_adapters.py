"""The adapter endpoints on a real Redis: uploads, folders, rollback, deletion, and what they refuse."""

import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save

from api.cli.client import InferenceClient
from api.cli.http import RequestFailedError
from shared.redis.processes.worker_registry import WorkerStatus
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL, Answer, ScriptedWorker, working
from tests.unit.adapter_files import Q, lora, mlx_config, peft_config, peft_tensors, write
from tests.unit.api_texts import bundle

Files = list[tuple[str, tuple[str, bytes, str]]]
BINARY = "application/octet-stream"


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with working(redis_url, lambda spec: Answer()) as playing:
        yield playing


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    write(folder / "good", mlx_config(), lora())
    write(tmp_path / "outside", mlx_config(), lora())
    return folder


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker, folders: Path) -> AsyncIterator[Api]:
    async with api(redis_url, adapter_dirs=[folders], max_adapter_bytes=100_000) as serving:
        yield serving


def files(config: dict[str, Any] | None = None, tensors: Any = None) -> Files:
    """Parts of a multipart upload."""
    parts: Files = [("file", ("adapters.safetensors", save(lora() if tensors is None else tensors), BINARY))]
    if config is not None:
        parts.append(("config", ("adapter_config.json", json.dumps(config).encode(), "application/json")))
    return parts


async def state(server: Api) -> Any:
    return [
        {key: value for key, value in adapter.items() if key != "base_sha256"}
        for adapter in (await server.http.get("/v1/adapters")).json()["data"]
    ]


async def test_an_uploaded_adapter_is_described_and_listed(server: Api) -> None:
    fields = {"name": "policy", "train_step": "7", "metrics": '{"reward": 0.5}'}
    created = await server.http.post("/v1/adapters", data=fields, files=files(mlx_config()))
    assert created.status_code == 201, created.text
    manifest = created.json()
    assert (manifest["id"], manifest["rank"], manifest["scale"], manifest["kind"]) == ("policy@1", 4, 20.0, "lora")
    assert (manifest["train_step"], manifest["metrics"], manifest["base_sha256"]) == (7, {"reward": 0.5}, "base")
    again = await server.http.post("/v1/adapters", data={"name": "policy"}, files=files(mlx_config()))
    assert again.status_code == 409
    added = await server.http.post("/v1/adapters/policy/versions", files=files(tensors=lora(seed=1)))
    assert (added.status_code, added.json()["id"], added.json()["parent"]) == (201, "policy@2", 1)
    described = (await server.http.get("/v1/adapters/policy")).json()
    assert (described["latest"], [each["version"] for each in described["versions"]]) == (2, [1, 2])
    assert [move["version"] for move in described["history"]] == [2, 1]
    assert described["acks"] == {}
    assert (await server.http.get("/v1/adapters/policy/versions/1")).json() == described["versions"][0]
    assert [adapter["name"] for adapter in await state(server)] == ["policy"]
    assert (await server.http.get("/v1/adapters/other")).json()["error"]["code"] == "adapter_not_found"


async def test_a_version_is_downloaded_as_it_was_uploaded(server: Api) -> None:
    sent = save(lora(seed=3))
    await server.http.post("/v1/adapters", data={"name": "policy"}, files=files(mlx_config(), lora(seed=3)))
    got = await server.http.get("/v1/adapters/policy/versions/1/adapters.safetensors")
    assert (got.status_code, got.content, got.headers["content-length"]) == (200, sent, str(len(sent)))
    assert got.headers["etag"].strip('"') == hashlib.sha256(sent).hexdigest()
    said = (await server.http.get("/v1/adapters/policy/versions/1/adapter_config.json")).json()
    assert said["lora_parameters"] | {"keys": []} == {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": []}
    for path in ("policy/versions/2", "other/versions/1"):
        for file in ("adapters.safetensors", "adapter_config.json"):
            missing = await server.http.get(f"/v1/adapters/{path}/{file}")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "adapter_not_found")


async def test_a_version_that_came_damaged_is_not_kept_for_a_whole_one(server: Api, tmp_path: Path) -> None:
    await server.http.post("/v1/adapters", data={"name": "policy"}, files=files(mlx_config()))
    async with InferenceClient(str(server.http.base_url)) as client:
        manifest = await client.adapter_version("policy")
        await client.download_adapter(manifest, tmp_path / "whole")
        assert (tmp_path / "whole").read_bytes() == save(lora())
        with pytest.raises(RequestFailedError, match="policy@1 came damaged"):
            await client.download_adapter(msgspec.structs.replace(manifest, sha256="0" * 64), tmp_path / "other")
        with pytest.raises(RequestFailedError, match="there is no adapter nobody@1"):
            await client.adapter_version("nobody", 1)


async def test_a_peft_upload_is_stored_in_our_layout(server: Api, tmp_path: Path) -> None:
    upload = files(peft_config(), peft_tensors(lora()))
    response = await server.http.post("/upload_adapter", files=upload)
    assert response.json() == {
        "status": "success", "policy_version": 1, "message": "Loaded policy@1 from the upload"
    }  # fmt: skip
    store = server.ring.adapters
    data = b"".join([chunk async for chunk in store.fetch(await store.manifest("policy", 1))])
    (tmp_path / "stored.safetensors").write_bytes(data)
    stored = load_file(tmp_path / "stored.safetensors")
    np.testing.assert_array_equal(stored[f"{Q}.lora_a"], lora()[f"{Q}.lora_a"])


async def test_weights_alone_take_the_latest_versions_configuration(server: Api) -> None:
    fields = {"adapter_id": "actor"}
    missing = await server.http.post("/update_adapter_weights", data=fields, files=files())
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "adapter_not_found")
    assert (await server.http.post("/upload_adapter", data={"name": "actor"}, files=files())).status_code == 400
    assert await state(server) == []
    await publish(server.ring.adapters, "actor")
    updated = await server.http.post("/update_adapter_weights", data=fields, files=files(tensors=lora(seed=2)))
    assert updated.json()["policy_version"] == 2
    assert (await server.ring.adapters.manifest("actor", 2)).scale == 20.0


SCALED = mlx_config(lora_parameters={"rank": 4, "scale": 1e300})


def _nan() -> Files:
    tensors = lora()
    tensors[f"{Q}.lora_b"][1, 2] = np.nan
    return files(mlx_config(), tensors)


@pytest.mark.parametrize(
    ("upload", "fields", "status", "reason"),
    [
        (_nan, {}, 400, "not finite"),
        (lambda: files(SCALED), {}, 400, "scale 1e+300 is not finite in float32"),
        (lambda: files(mlx_config(), {**lora(), f"{Q}.lora_b": np.full((4, 20), 3e38, np.float32)}), {}, 400, "6e+39"),
        (lambda: files(mlx_config(), lora(rank=8)), {}, 400, "rank"),
        (lambda: [("file", ("adapters.safetensors", save(lora())[:-9], BINARY))], {}, 400, "adapters.safetensors"),
        (lambda: [("file", ("adapters.npz", b"x", BINARY))], {}, 400, "adapters.npz"),
        (lambda: [("config", ("adapter_config.json", b"{}", BINARY))], {}, 400, "is required"),
        (lambda: [*files(), *files()], {}, 400, "two safetensors"),
        (lambda: files(peft_config(modules_to_save=["lm_head"]), peft_tensors(lora())), {}, 400, "modules_to_save"),
        (lambda: [("file", ("adapters.safetensors", bytes(100_001), BINARY))], {}, 413, "100000"),
        (lambda: [("file", ("adapters.safetensors", bytes(3_000_000), BINARY))], {}, 413, "100000"),
        (lambda: files(mlx_config()), {"colour": "red"}, 400, "colour"),
        (lambda: files(mlx_config()), {"name": "a/b"}, 400, "no adapter name"),
        (lambda: files(mlx_config()), {"name": MODEL}, 400, "name of a model"),
        (lambda: files(mlx_config()), {"model": "nobody"}, 404, "nobody"),
        (lambda: files(mlx_config()), {"if_latest": "3"}, 409, "latest"),
        (lambda: files(mlx_config()), {"metrics": "no"}, 400, "metrics"),
    ],
)
async def test_a_wrong_upload_is_refused_and_nothing_changes(
    server: Api, upload: Callable[[], Files], fields: dict[str, str], status: int, reason: str
) -> None:
    await publish(server.ring.adapters)
    before = await state(server)
    response = await server.http.post("/upload_adapter", data=fields, files=upload())
    assert response.status_code == status, response.text
    assert reason in response.json()["error"]["message"]
    assert await state(server) == before


async def test_a_body_that_is_no_form_is_refused(server: Api) -> None:
    for response in (
        await server.post("/upload_adapter", {"name": "x"}),
        await server.http.post("/upload_adapter", content=b"x", headers={"content-type": "multipart/form-data"}),
    ):
        assert response.status_code == 400, response.text


async def load(server: Api, path: object) -> httpx.Response:
    return await server.post("/load_adapter", {"adapter_path": str(path)})


async def test_folders_are_read_below_adapter_dirs_only(server: Api, folders: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (folders / "link").symlink_to(outside)
    (folders / "inner").symlink_to(folders / "good")
    write(folders / "linked-file", mlx_config(), {})
    (folders / "linked-file" / "adapters.safetensors").unlink()
    (folders / "linked-file" / "adapters.safetensors").symlink_to(outside / "adapters.safetensors")
    (folders / "circle").symlink_to(folders / "circle")
    (folders / "piped").mkdir()
    os.mkfifo(folders / "piped" / "adapter_config.json")
    (folders / "empty").mkdir()
    for path in (
        outside, folders / "link", folders / ".." / "outside", "../outside", folders / "linked-file",
        folders / "circle", folders / "piped", folders / "empty", folders / "good" / "adapter_config.json",
        "/etc", "no\0where", "a" * 5000, f"{folders}-not", "",
    ):  # fmt: skip
        response = await load(server, path)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "adapter_rejected"), (path, response)
    assert await state(server) == []
    for version, path in enumerate((folders / "good", "good", folders / "inner"), 1):
        response = await load(server, path)
        assert (response.status_code, response.json()["policy_version"]) == (200, version), response.text


async def test_the_refusal_does_not_tell_what_exists_outside(server: Api, tmp_path: Path) -> None:
    told = [(await load(server, path)).json()["error"]["message"] for path in (tmp_path / "outside", tmp_path / "none")]
    assert told[0].replace("outside", "none") == told[1]


async def test_without_adapter_dirs_nothing_is_read(redis_url: str, worker: ScriptedWorker, folders: Path) -> None:
    async with api(redis_url) as server:
        response = await load(server, folders / "good")
        assert response.status_code == 400
        assert "--adapter-dirs" in response.json()["error"]["message"]


async def test_versions_are_rolled_back_switched_and_deleted(server: Api) -> None:
    store = server.ring.adapters
    for seed in range(3):
        await publish(store, seed=seed)
    rolled = await server.http.post("/v1/adapters/policy/rollback")
    assert (rolled.status_code, rolled.json()["policy_version"]) == (200, 2)
    assert (await server.post("/v1/adapters/policy/rollback", {"version": 1})).json()["policy_version"] == 1
    assert (await server.http.post("/v1/adapters/policy/rollback")).status_code == 409
    assert (await server.post("/v1/adapters/policy/rollback", {"version": 9})).status_code == 404
    for version, latest in ((3, 3), ("2", 2), ("policy@3", 3)):
        assert (await server.post("/model/switch-lora", {"version": version})).status_code == 200
        assert await store.latest("policy") == latest
    for version, status in ((9, 404), ("nobody@1", 404), ("checkpoint-300", 400), ("a@1:0.5,a@2:0.5", 400)):
        assert (await server.post("/model/switch-lora", {"version": version})).status_code == status
    assert (await server.http.delete("/v1/adapters/policy/versions/3")).status_code == 409
    await store.pin("policy", 2, "w1", 60)
    assert (await server.http.delete("/v1/adapters/policy/versions/2")).status_code == 409
    assert (await server.http.delete("/v1/adapters/policy")).status_code == 409
    assert (await server.http.delete("/v1/adapters/policy/versions/1")).json()["deleted"]
    assert await store.versions("policy") == [2, 3]
    await store.unpin("policy", 2, "w1")
    assert (await server.http.delete("/v1/adapters/policy")).status_code == 200
    assert (await server.http.delete("/v1/adapters/policy")).status_code == 404
    assert await state(server) == []


async def test_a_candidate_serves_by_number_until_it_is_promoted(server: Api) -> None:
    await publish(server.ring.adapters)
    fields = {"set_latest": "false"}
    added = await server.http.post("/v1/adapters/policy/versions", data=fields, files=files(mlx_config()))
    assert added.json()["version"] == 2
    assert await server.ring.adapters.latest("policy") == 1
    assert (await server.post("/v1/completions", {"prompt": "a", "model": "policy@2"})).status_code == 200
    checks = [{"name": "reload_parity", "passed": True, "detail": "0.01", "value": 0.01}]
    promoted = await server.post("/v1/adapters/policy/promote", {"version": 2, "gate": checks})
    assert promoted.json()["policy_version"] == 2
    assert (await server.http.get("/v1/adapters/policy/versions/2")).json()["gate"] == checks
    assert (await server.post("/v1/adapters/policy/promote", {"version": 1})).status_code == 409


async def test_vllms_names_load_and_unload(server: Api, folders: Path) -> None:
    body = {"lora_name": "lora", "lora_path": str(folders / "good")}
    loaded = await server.post("/v1/load_lora_adapter", body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'lora' added successfully.")
    assert (await server.post("/v1/load_lora_adapter", body)).status_code == 400
    assert (await server.post("/v1/load_lora_adapter", {**body, "load_inplace": True})).status_code == 200
    assert await server.ring.adapters.latest("lora") == 2
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "lora"})).status_code == 200
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "lora"})).status_code == 404
    gone = await server.post("/v1/load_lora_adapter", {**body, "lora_path": str(folders / "nowhere")})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_path")


async def test_vllms_load_says_which_base_when_there_are_two(server: Api, folders: Path) -> None:
    registry = server.ring.registry
    await registry.register_model(msgspec.structs.replace(CARD, name="other", base_sha256="another"), bundle())
    await registry.heartbeat(WorkerStatus("w2", "other", "host", 1, "ready", 0, 8, 0, 0, 1, 0.0, 0, 1, 2**40))
    body = {"lora_name": "lora", "lora_path": str(folders / "good")}
    unsaid = await server.post("/v1/load_lora_adapter", body)
    assert unsaid.status_code == 400, unsaid.text
    assert (await server.post("/v1/load_lora_adapter", {**body, "base_model_name": MODEL, "model": "x"})).is_error
    for name in ("model", "base_model_name"):
        said = await server.post("/v1/load_lora_adapter", {**body, name: MODEL, "load_inplace": True})
        assert said.status_code == 200, said.text


async def test_uploads_leave_only_the_newest_versions(redis_url: str, worker: ScriptedWorker) -> None:
    async with api(redis_url, adapter_keep_n=2) as server:
        for seed in range(4):
            assert (await server.http.post("/upload_adapter", files=files(mlx_config(), lora(seed=seed)))).is_success
        assert await server.ring.adapters.versions("policy") == [3, 4]


async def test_a_candidate_is_rejected_with_its_checks_and_another_is_the_best(server: Api) -> None:
    checks = [{"name": "kl", "passed": True, "detail": "0.1", "value": None}]
    await publish(server.ring.adapters)
    fields = {"set_latest": "false", "parent": "1", "gate": json.dumps(checks)}
    made = await server.http.post("/v1/adapters/policy/versions", data=fields, files=files(mlx_config()))
    assert (made.json()["parent"], made.json()["gate"]) == (1, checks)
    failed = [*checks, {"name": "parity", "passed": False, "detail": "far", "value": 0.5}]
    refused = await server.post("/v1/adapters/policy/reject", {"version": 1, "gate": failed})
    assert refused.status_code == 409, "the latest cannot be rejected"
    assert (await server.post("/v1/adapters/policy/reject", {"version": 2, "gate": failed})).json() == {
        "id": "policy@2", "object": "adapter.version", "status": "rejected"
    }  # fmt: skip
    shown = (await server.http.get("/v1/adapters/policy/versions/2")).json()
    assert (shown["status"], shown["gate"]) == ("rejected", failed)
    assert (await server.post("/v1/adapters/policy/promote", {"version": 2})).status_code == 409
    assert (await server.post("/v1/adapters/policy/best", {"version": 1, "value": 0.5})).status_code == 200
    described = (await server.http.get("/v1/adapters/policy")).json()
    assert (described["best"], described["best_value"]) == (1, 0.5)
    for path in ("reject", "best"):
        wrong = await server.post(
            f"/v1/adapters/policy/{path}", {"version": 9, "value": 1} if path == "best" else {"version": 9}
        )
        assert wrong.status_code == 404
