"""Checkpoints as files, by addresses: what is in them, and for whom and how long an address serves."""

import io
import tarfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
from redis.asyncio import Redis
from safetensors.numpy import load as read_safetensors
from safetensors.numpy import save as write_safetensors

from shared.adapter_files.formats import prepare_directory
from shared.learners import LearnerSpec, SaveDone, SaveInfo, SaveKind
from shared.redis import keys
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer
from tests.waiting import HANG_S

MODULE = "model.layers.0.self_attn.q_proj"
A = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)
B = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)
STATE = write_safetensors(
    {
        f"weights/{MODULE}.lora_a": A,
        f"weights/{MODULE}.lora_b": B,
        f"adam/m/{MODULE}.lora_a": 2 * A,
        "adam/step": np.array(3, np.int64),
        "spoiled": np.zeros(0, np.uint8),
    }
)


def script(spec: Any) -> Answer:
    return Answer("hi")


async def saved(server: Api, name: str, kind: SaveKind, number: int, *, version: int = 0, keeper: str = "") -> str:
    """A save of the learner `s:train:0`, as a training service makes it; its path behind /api/v1."""
    store, now = server.ring.learners, time.time_ns() // 1_000_000
    spec = LearnerSpec(id="s:train:0", model=MODEL, rank=2, scale=4.0, adapter="policy", keeper=keeper)
    await store.create(spec if keeper else msgspec.structs.replace(spec, keeper=keys.keeper("tinker of ")))
    held = await store.take(spec.id)
    assert held is not None
    bytes_id = "" if version else await store.put_saved(spec.id, STATE)
    info = SaveInfo(name=name, kind=kind, created_ms=now, expires_ms=now + 99_000, bytes_id=bytes_id, version=version)
    assert await store.put_answer(held, number, SaveDone(name, kind), save=info)
    segment = {"state": "weights", "sampler": "sampler_weights", "external": "external_weights"}[kind]
    return f"/api/v1/training_runs/{spec.id}/checkpoints/{segment}/{name}"


async def bare(url: str) -> httpx.Response:
    """As the SDK reads an address: nothing but the address."""
    async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as http:
        return await http.get(url)


async def unpacked(server: Api, path: str, folder: Path) -> list[str]:
    address = await server.http.get(f"{path}/archive")
    assert address.status_code == 200, address.text
    archive = await bare(address.json()["url"])
    assert archive.status_code == 200, archive.text
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        tar.extractall(folder, filter="data")
        return tar.getnames()


async def test_an_archive_is_an_adapter_of_peft_with_its_moments(server: Api, tmp_path: Path) -> None:
    path = await saved(server, "a", "state", 1)
    names = await unpacked(server, path, tmp_path)
    assert names == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "checkpoint_complete",
    ]
    adapter = read_safetensors((tmp_path / "adapter_model.safetensors").read_bytes())
    np.testing.assert_array_equal(adapter[f"base_model.model.{MODULE}.lora_A.weight"], A.T)
    np.testing.assert_array_equal(adapter[f"base_model.model.{MODULE}.lora_B.weight"], B.T)
    config = msgspec.json.decode((tmp_path / "adapter_config.json").read_bytes())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 8.0, [MODULE])
    moments = read_safetensors((tmp_path / "optimizer.safetensors").read_bytes())
    np.testing.assert_array_equal(moments[f"m/{MODULE}.lora_a"], 2 * A)
    assert moments["step"] == 3
    again = tmp_path / "again"
    again.mkdir()
    taken = prepare_directory(tmp_path, again)  # what was downloaded can be uploaded
    assert (taken.kind, taken.rank, taken.scale, taken.modules) == ("lora", 2, 4.0, (MODULE,))


async def test_a_sampler_s_archive_is_the_version_that_it_names(server: Api, tmp_path: Path) -> None:
    manifest = await publish(server.ring.adapters, "policy", seed=5)
    path = await saved(server, "kept", "sampler", 1, version=manifest.version)
    assert "optimizer.safetensors" not in await unpacked(server, path, tmp_path)
    again = tmp_path / "again"
    again.mkdir()
    assert prepare_directory(tmp_path, again).sha256 == manifest.sha256


async def test_external_weights_have_an_address_a_file(server: Api) -> None:
    path = await saved(server, "out", "external", 1)
    said = (await server.http.get(f"{path}/external_weights_urls")).json()
    assert set(said["urls"]) == {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}
    read = {name: (await bare(url)).content for name, url in said["urls"].items()}
    assert read["checkpoint_complete"] == b"" and msgspec.json.decode(read["adapter_config.json"])["r"] == 2
    assert len(read_safetensors(read["adapter_model.safetensors"])) == 2
    listed = (await server.http.get("/api/v1/checkpoints")).json()
    assert listed["checkpoints"] == [], "a run that nobody noted"
    one = (await server.http.get("/api/v1/training_runs/s:train:0/checkpoints")).json()["checkpoints"]
    assert [(each["checkpoint_id"], each["checkpoint_type"]) for each in one] == [("external_weights/out", "external")]
    load = {"model_id": "s:train:0", "seq_id": 1, "path": "tinker://s:train:0/external_weights/out", "optimizer": True}
    assert (await server.post("/api/v1/load_weights", load)).status_code == 400


async def test_an_address_serves_one_checkpoint_and_not_for_ever(server: Api, redis: Redis) -> None:
    path = await saved(server, "a", "state", 1)
    url = (await server.http.get(f"{path}/archive")).json()["url"]
    ticket = urlsplit(url).path.split("/")[-2]
    (key,) = [key async for key in redis.scan_iter("parallm:tinker-download:*")]
    assert ticket.encode() not in key, "Redis does not know the address"
    assert 0 < await redis.ttl(key) <= keys.TINKER_DOWNLOAD_TTL_S
    for wrong in (url.replace(ticket, "x" * 43), url.replace(ticket, ticket[:-1])):
        answer = await bare(wrong)
        assert answer.status_code == 410 and "ask for another one" in answer.text
    assert (await bare(url.replace("checkpoint.tar", "..%2f..%2fetc%2fpasswd"))).status_code in (400, 404)
    assert (await bare(url.replace("checkpoint.tar", "passwd"))).status_code == 400
    assert (await bare(url.replace("/home/", "/elsewhere/"))).status_code == 400
    await saved(server, "a", "state", 2)
    assert (await bare(url)).status_code == 404, "another one has the name"
    url = (await server.http.get(f"{path}/archive")).json()["url"]
    await redis.delete(keys.learner_saved("s:train:0", (await server.ring.learners.saves("s:train:0"))[0].bytes_id))
    assert (await bare(url)).status_code == 404, "its bytes are gone"
    assert (await server.http.delete(path)).status_code == 200
    assert (await bare(url)).status_code == 404
    assert (await server.http.get(f"{path}/archive")).status_code == 404
    await redis.delete(*[key async for key in redis.scan_iter("parallm:tinker-download:*")])
    assert (await bare(url)).status_code == 410


async def test_only_the_owner_of_a_checkpoint_is_told_an_address(server: Api, redis_url: str) -> None:
    path = await saved(server, "a", "state", 1, keeper=keys.keeper("tinker of mine"))
    given = "plm-the-first-of-two-keys name=mine,plm-the-second-of-two-keys name=yours"
    async with api(redis_url, api_key=given) as keyed:
        said = {}
        for name, key in (("mine", "plm-the-first-of-two-keys"), ("yours", "plm-the-second-of-two-keys"), ("", "no")):
            headers = {"x-api-key": f"tml-{key}"}
            said[name] = await keyed.http.get(f"{path}/archive", headers=headers)
        assert {name: answer.status_code for name, answer in said.items()} == {"mine": 200, "yours": 404, "": 401}
        assert (await bare(said["mine"].json()["url"])).status_code == 200, "an address needs no key"
