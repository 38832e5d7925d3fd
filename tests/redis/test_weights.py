"""Weights from another host of the ring: what is given, what is believed, and what of it is here after a fault."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared.wire import Channel, PeerError
from tests.redis.test_hosts import hosting, model, scripted, sha256_of, starts
from tests.waiting import wait_until
from worker.host.weights import files, giver
from worker.host.weights.files import WeightFiles, WeightsRequest, files_of
from worker.host.weights.giver import WeightGiver
from worker.host.weights.taker import WeightTaker

__all__ = ["scripted"]  # a fixture for all tests here

SHA256 = "ab" * 32
ASK = WeightsRequest("a", SHA256)
ports: dict[WeightGiver, int] = {}
WEIGHTS = bytes(range(251)) * 400


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giver, "PIECE_BYTES", 10_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, with more in it than is given."""
    path = tmp_path / "a"
    (path / "below").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(WEIGHTS)
    (path / "empty.txt").touch()
    (path / "model.py").write_text("code")
    (tmp_path / "secret.json").write_text("no part of the model")
    (path / "link.json").symlink_to(tmp_path / "secret.json")
    return path


@pytest.fixture
async def giving(folder: Path) -> AsyncIterator[WeightGiver]:
    made = WeightGiver(lambda: b"s" * 32, lambda ask: folder if ask == ASK else None)
    ports[made] = made.listen("127.0.0.1")
    yield made
    await made.close()


def taker(path: Path, secret: bytes = b"s" * 32) -> WeightTaker:
    return WeightTaker(path / "weights", lambda: secret)


async def taken(made: WeightTaker, giving: WeightGiver, ask: WeightsRequest = ASK) -> str:
    progress: list[float] = []
    why = await made.take(ask, {"mini": f"127.0.0.1:{ports[giving]}"}, progress.append)
    assert progress == sorted(progress) and (why or progress[-1] == 1.0)
    return why


async def test_a_models_own_files_are_given_and_no_others(tmp_path: Path, giving: WeightGiver) -> None:
    made = taker(tmp_path)
    assert await taken(made, giving) == ""
    stored = made.stored(SHA256)
    assert stored is not None and {path.name for path in stored.iterdir()} == {
        "config.json", "model.safetensors", "empty.txt"
    }  # fmt: skip
    assert (stored / "model.safetensors").read_bytes() == WEIGHTS
    made.forget(SHA256)
    assert made.stored(SHA256) is None


async def test_what_was_cut_off_is_continued(
    tmp_path: Path, giving: WeightGiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, send = taker(tmp_path), Channel.send

    async def dies(self: Channel, head: bytes, body: tuple[memoryview, ...] = ()) -> None:
        if giving.bytes > 50_000:
            raise PeerError("killed")
        await send(self, head, body)

    monkeypatch.setattr(Channel, "send", dies)
    assert "mini" in await taken(made, giving)
    assert made.stored(SHA256) is None
    monkeypatch.setattr(Channel, "send", send)
    before = giving.bytes
    assert await taken(made, giving) == ""
    assert 0 < giving.bytes - before < len(WEIGHTS) - 40_000
    stored = made.stored(SHA256)
    assert stored is not None and (stored / "model.safetensors").read_bytes() == WEIGHTS


async def test_weights_that_were_used_least_recently_leave_a_full_folder(tmp_path: Path, giving: WeightGiver) -> None:
    made = WeightTaker(tmp_path / "weights", lambda: b"s" * 32, 290_000)
    held, old, new, foreign = (tmp_path / "weights" / name for name in ("01" * 32, "02" * 32, "03" * 32, "notes"))
    for at, path in enumerate((held, old, new, foreign)):
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(WEIGHTS[:60_000])
        os.utime(path, (at, at))
    made.note_use(old.name)
    why = await made.take(ASK, {"mini": f"127.0.0.1:{ports[giving]}"}, lambda progress: None, {held.name})
    assert why == "" and {path for path in (held, old, new, foreign) if path.exists()} == {held, old, foreign}
    small = WeightTaker(tmp_path / "small", lambda: b"s" * 32, 50_000)
    assert "--weights-cache-gb" in await small.take(ASK, {"mini": f"127.0.0.1:{ports[giving]}"}, lambda progress: None)


async def test_other_weights_and_strangers_get_nothing(tmp_path: Path, giving: WeightGiver) -> None:
    assert "it has no such weights" in await taken(taker(tmp_path), giving, WeightsRequest("a", "cd" * 32))
    assert "it has no such weights" in await taken(taker(tmp_path), giving, WeightsRequest("b", SHA256))
    assert "mini: " in await taken(taker(tmp_path, b"x" * 32), giving)
    assert "the hash of its weights is not known" in await taken(taker(tmp_path), giving, WeightsRequest("a", "../up"))
    assert giving.bytes == 0 and not (tmp_path / "weights").exists()


@pytest.mark.parametrize("name", ["../up.json", "/etc/x.json", "a/b.json", "code.py", ".hidden.json"])
def test_a_file_that_is_no_models_is_not_written(name: str) -> None:
    with pytest.raises(PeerError, match="none of a model's"):
        WeightFiles({"config.json": 2, name: 1}).checked()
    with pytest.raises(PeerError, match="no model's"):
        WeightFiles({"tokenizer.json": 2}).checked()


def test_files_of_the_hubs_cache_are_given(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "f00").write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/f00")
    assert set(files_of(folder)) == {"config.json"}
    assert files.NAME.fullmatch("model-00001-of-00002.safetensors")


async def test_a_host_loads_a_model_whose_files_another_one_has(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    a, b, mine = model(tmp_path, "a"), model(tmp_path, "b"), tmp_path / "cache"
    for each in (a, b):
        (each / "config.json").write_text("{}")
    own = {"from_catalogue": True, "worker_id": "taker", "weights_cache_dir": mine, "kv_transfer_host": "127.0.0.1"}
    others = {"worker_id": "giver", "weights_cache_dir": tmp_path / "other", "kv_transfer_host": "127.0.0.1"}
    async with hosting(redis, redis_url, a, b, **others) as giving:
        await wait_until(giving.becomes(a="ready"))
        own_model = model(tmp_path, "own")
        async with hosting(redis, redis_url, own_model, **own, model="") as ring:  # it knows no model yet
            await ring.store.order("load", "b", "taker")
            await wait_until(ring.becomes(b="ready"))
            assert [each[1] for each in starts(mine / sha256_of("b"))] == ["b"]
    a.rename(tmp_path / "gone")
    b.rename(tmp_path / "gone too")
    async with hosting(redis, redis_url, own_model, **own) as ring:
        await ring.store.order("load", "b", "taker")
        await wait_until(ring.becomes(b="ready"))


async def test_weights_that_are_others_than_their_name_says_are_removed(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    a, b, mine = model(tmp_path, "a"), model(tmp_path, "b"), tmp_path / "cache"
    (b / "config.json").write_text("{}")
    own = {"from_catalogue": True, "worker_id": "taker", "weights_cache_dir": mine, "kv_transfer_host": "127.0.0.1"}
    others = {"worker_id": "giver", "weights_cache_dir": tmp_path / "other", "kv_transfer_host": "127.0.0.1"}
    async with hosting(redis, redis_url, a, b, **others) as giving:
        await wait_until(giving.becomes(a="ready"))
        seen = (b / "answer.json").stat()
        (b / "answer.json").write_bytes((a / "answer.json").read_bytes())
        os.utime(b / "answer.json", ns=(seen.st_atime_ns, seen.st_mtime_ns))  # so that the giver does not look again
        async with hosting(redis, redis_url, model(tmp_path, "own"), **own) as ring:
            await ring.store.order("load", "b", "taker")
            await wait_until(lambda: _failed(ring))
    assert not list(mine.iterdir())


async def _failed(ring: object) -> bool:
    held = await ring.held()  # type: ignore[attr-defined]
    return "b" in held and held["b"].state == "failed" and "the catalogue asks for" in held["b"].why
