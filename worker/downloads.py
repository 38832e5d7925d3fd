"""Progress of a model's download from the hub, while the engine's thread waits for it: in the log and in `/health`.

The hub's library writes each file into its cache under a name that ends in `.incomplete`; sizes there are the progress.
"""

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import structlog
from redis.exceptions import RedisError

from shared.fit.plan import gb
from shared.process.model_aliases import hub_folder, is_hub_name
from shared.redis.connection.client import connect
from shared.redis.processes.child_troubles import ChildTrouble, ChildTroubles

log = structlog.get_logger()

LOOK_S = 5.0
SAY_EVERY_S = 15.0


class ModelDownload:
    """The download of one model into the hub's cache."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = hub_folder(name) / "blobs"

    def progress(self) -> int | None:
        """Bytes that are here; None while nothing is being fetched."""
        with contextlib.suppress(OSError):
            files = list(self._folder.iterdir())
            if any(file.name.endswith(".incomplete") for file in files):
                return sum(_size(file) for file in files)
        return None


def hub_download(name: str) -> ModelDownload | None:
    """The download of a model that is named as on the hub; None for a folder."""
    return None if Path(name).expanduser().exists() or not is_hub_name(name) else ModelDownload(name)


def whole_size(name: str) -> int:
    """Bytes of all files of the model that are fetched; 0 where the hub does not say."""
    from huggingface_hub import snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    try:
        files = snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS, dry_run=True)
    except Exception:  # of the network or the hub: the download itself says so
        return 0
    return sum([int(file.file_size or 0) for file in files if not isinstance(file, str)])


async def report_download(download: ModelDownload, redis_url: str, who: str, whole: int = 0) -> None:
    """Say how far it is, until cancelled. `whole`: bytes in all; 0: unknown."""
    redis, host = connect(redis_url), socket.gethostname().split(".")[0]
    troubles, said, reported = ChildTroubles(redis), 0.0, False
    try:
        while True:
            here = await asyncio.to_thread(download.progress)
            if here is not None:
                whole = whole or await asyncio.to_thread(whole_size, download.name)
                text = f"{gb(here)} of {gb(whole)}" if whole else gb(here)
                if time.monotonic() - said > SAY_EVERY_S or not said:
                    log.info("worker.downloading", model=download.name, progress=text)
                    said = time.monotonic()
                note = f"{who} on {host} is downloading {download.name}: {text}"
                reported = True  # before it is: when cancelled amid the call it may have arrived
                with contextlib.suppress(RedisError, OSError):
                    await troubles.report(who, [ChildTrouble("worker", host, 0, 0, note=note)])
            await asyncio.sleep(LOOK_S)
    finally:
        with contextlib.suppress(RedisError, OSError):
            if reported:
                await troubles.report(who, [])
        await redis.aclose()


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0
