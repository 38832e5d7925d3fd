"""A model that is being downloaded: how far it is stands in the log and in what `/health` reads."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared.redis.connection.client import connect
from shared.redis.processes.child_troubles import ChildTroubles
from tests.waiting import wait_until
from worker import downloads
from worker.downloads import ModelDownload, hub_download, report_download

NAME = "mlx-community/Qwen3-4B-4bit"


def test_only_a_name_of_the_hub_is_downloaded(tmp_path: Path) -> None:
    assert hub_download("models/tiny") is None, "a folder"
    assert hub_download(str(tmp_path)) is None and hub_download("./a/b") is None
    download = hub_download(NAME)
    assert download is not None and download.name == NAME


async def test_progress_is_told_until_it_is_over(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "LOOK_S", 0.02)
    blobs = tmp_path / "models--mlx-community--Qwen3-4B-4bit" / "blobs"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    download = ModelDownload(NAME)
    assert download.progress() is None
    blobs.mkdir(parents=True)
    (blobs / "aa").write_bytes(b"x" * 1_000_000)
    assert download.progress() is None, "what is whole is not under way"
    redis: Redis = connect(redis_url)
    reporting = asyncio.create_task(report_download(download, redis_url, "w1", whole=9_000_000))
    try:
        (blobs / "bb.incomplete").write_bytes(b"x" * 3_000_000)

        async def is_told() -> bool:
            notes = [trouble.message for trouble in await ChildTroubles(redis).read()]
            return any(note.endswith(f"is downloading {NAME}: 4 MB of 9 MB") for note in notes)

        await wait_until(is_told)
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        assert await ChildTroubles(redis).read() == []
    finally:
        reporting.cancel()
        await redis.aclose()
