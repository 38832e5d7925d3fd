"""Adapter versions in a store, from small directories on disk."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shared.adapter_files.formats import prepare_directory
from shared.adapters import AdapterManifest, PreparedAdapter
from shared.redis.adapters.store import AdapterStore
from tests.redis.scripted_worker import CARD
from tests.unit.adapter_files import lora, mlx_config, write


def prepared(folder: Path, seed: int = 0, rank: int = 4) -> PreparedAdapter:
    """A checked adapter whose values depend on the seed."""
    config = mlx_config(lora_parameters={"rank": rank, "scale": 20.0, "dropout": 0.0})
    source = write(folder / f"source-{seed}", config, lora(seed=seed, rank=rank))
    workdir = folder / f"work-{seed}"
    workdir.mkdir(exist_ok=True)
    return prepare_directory(source, workdir)


async def publish(
    store: AdapterStore, name: str = "policy", *, seed: int = 0, base: str = CARD.base_sha256, **arguments: Any
) -> AdapterManifest:
    """The next version of an adapter."""
    with TemporaryDirectory() as folder:
        return await store.publish(name, prepared(Path(folder), seed), base_sha256=base, **arguments)
