"""Adapter files on their way into the store: from an upload, or from a folder of this host.

Invariants. What is checked and published is a copy of ours in a temporary folder. Files are read from configured
folders only: paths are resolved, symbolic links included, before anything is looked at. A refusal changes nothing.
"""

import asyncio
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fastapi import Request
from starlette.datastructures import UploadFile

from api.adapters.bodies import UploadFields, checks_of
from api.generation.target import card_of_base
from api.ring.ring import Ring
from shared.adapter_files.config import MAX_CONFIG_BYTES, read_config
from shared.adapter_files.formats import CONFIG_FILE, MLX_FILE, PEFT_FILE, inherit_config, prepare
from shared.adapters import NETWORK_BASE, AdapterManifest, check_name
from shared.errors import AdapterRejectedError, InvalidRequestError, PayloadTooLargeError, UnknownAdapterError
from shared.redis.training.board import TrainingBoard
from shared.sequences import ModelCard

_BLOCK = 1 << 20
_FORM_OVERHEAD = MAX_CONFIG_BYTES + (1 << 20)


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter that has arrived: our own copies of its files."""

    tensors: Path
    config: bytes | None  # None: that of the latest version holds
    source: str


async def receive(request: Request, ring: Ring, workdir: Path) -> tuple[AdapterFiles, dict[str, str]]:
    """The files of a multipart request and its other fields; what is too large is refused (413)."""
    limit = ring.settings.max_adapter_bytes
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit + _FORM_OVERHEAD:
        raise PayloadTooLargeError(f"an adapter may have {limit} bytes, this upload has {length}")
    fields: dict[str, str] = {}
    config: bytes | None = None
    tensors: Path | None = None
    async with request.form(max_files=2, max_fields=16, max_part_size=MAX_CONFIG_BYTES) as form:
        for key, value in form.multi_items():
            if not isinstance(value, UploadFile):
                fields[key] = value
            elif (name := value.filename or key).endswith(".json"):
                if config is not None:
                    raise InvalidRequestError(f"two {CONFIG_FILE} in one upload", param=key)
                config = await value.read(MAX_CONFIG_BYTES + 1)
            elif not name.endswith(".safetensors"):
                raise AdapterRejectedError(f"{name[:80]!r}: an adapter is {MLX_FILE} or {PEFT_FILE}", param=key)
            elif tensors is not None:
                raise InvalidRequestError("two safetensors files in one upload", param=key)
            else:
                tensors = workdir / MLX_FILE
                await asyncio.to_thread(_copy, value.file, tensors, limit)
    if tensors is None:
        raise InvalidRequestError(
            f"the adapter's {MLX_FILE} or {PEFT_FILE} is required, as a file of multipart/form-data", param="file"
        )
    return AdapterFiles(tensors, config, "upload"), fields


def read_folder(path: str, allowed: Sequence[Path], workdir: Path, limit: int) -> AdapterFiles:
    """Copies of an adapter directory's files; refused unless they lie under one of the allowed folders.

    UnknownAdapterError (404) for a folder that would be allowed and is not there.
    """
    if not allowed:
        raise AdapterRejectedError("this server reads no adapters from disk: see --adapter-dirs", param="adapter_path")
    roots = [root.resolve() for root in allowed]
    folder = _within(path, roots)
    config = workdir / CONFIG_FILE
    _copy_from(folder / CONFIG_FILE, roots, config, MAX_CONFIG_BYTES)
    data = config.read_bytes()
    name = PEFT_FILE if read_config(data).format == "peft" else MLX_FILE
    tensors = workdir / MLX_FILE
    _copy_from(folder / name, roots, tensors, limit)
    return AdapterFiles(tensors, data, str(folder))


async def publish(ring: Ring, name: str, fields: UploadFields, files: AdapterFiles, workdir: Path) -> AdapterManifest:
    """Check the files and make them the next version; AdapterRejectedError with the reason."""
    check_name(name)
    await ring.adapters.next_owner(name)
    if await ring.registry.card(name) is not None:
        raise InvalidRequestError(f"'{name}' is the name of a model; give the adapter another one", param="name")
    config = files.config if files.config is not None else await _inherited(ring, name)
    is_network = (await asyncio.to_thread(read_config, config)).network is not None
    known = await _known_base(ring, name)
    _check_nature(name, known, fields.model, is_network=is_network)
    card = None if is_network else await _base(ring, name, known, fields.model)
    adapter = await asyncio.to_thread(
        prepare,
        config,
        files.tensors,
        workdir,
        shapes=card.modules if card else {},
        hidden_size=card.head_inputs if card else 0,
        dtype=card.dtype if card else "",
        max_bytes=ring.settings.max_adapter_bytes,
    )
    manifest = await ring.adapters.publish(
        name,
        adapter,
        base_sha256=card.base_sha256 if card else NETWORK_BASE,
        parent=fields.parent,
        train_step=fields.train_step,
        metrics=fields.metrics,
        gate=checks_of(fields.gate),
        source=await _source(ring, name, fields, files),
        set_latest=fields.set_latest,
        if_latest=fields.if_latest,
    )
    ring.splits.forget(name)
    return manifest


async def _source(ring: Ring, name: str, fields: UploadFields, files: AdapterFiles) -> str:
    """Where a version comes from: a candidate is its policy's trainer's, if one lives."""
    is_trained = not fields.set_latest and await TrainingBoard(ring.redis, name).alive()
    return "trainer" if is_trained else files.source


def _check_nature(name: str, known: str, model: str | None, *, is_network: bool) -> None:
    """A name's versions are all networks, or none is."""
    if is_network and model is not None:
        raise InvalidRequestError("a network has no base model: leave 'model' out", param="model")
    if known and (known == NETWORK_BASE) != is_network:
        other = "language model's adapter" if is_network else "network"
        raise AdapterRejectedError(f"'{name}' is the name of a {other}: choose another one", param="name")


async def _known_base(ring: Ring, name: str) -> str:
    """The base that the name's versions are made for; "" without any."""
    try:
        return (await ring.adapters.summary(name)).base_sha256
    except UnknownAdapterError:
        return ""


async def _base(ring: Ring, name: str, known: str, model: str | None) -> ModelCard:
    if model is None:
        return await card_of_base(ring, known)
    card, _ = await ring.known(model)
    if known and known != card.base_sha256:
        raise AdapterRejectedError(f"adapter '{name}' belongs to another base model than '{model}'", param="model")
    return card


async def _inherited(ring: Ring, name: str) -> bytes:
    try:
        return inherit_config(await ring.adapters.manifest(name))
    except UnknownAdapterError as error:
        raise AdapterRejectedError(
            f"{CONFIG_FILE} is missing; only a further version of an adapter may come without one", param="file"
        ) from error


def _within(path: str, roots: Sequence[Path]) -> Path:
    """The resolved path, if it lies under a root; a relative one is taken from each root."""
    for root in roots:
        resolved = _resolved(root / path)  # an absolute path stays what it is
        if resolved is not None and any(resolved.is_relative_to(allowed) for allowed in roots):
            if resolved.is_dir():
                return resolved
            if root == roots[-1]:
                message = f"{path[:200]!r} is no folder"
                refusal = AdapterRejectedError if resolved.exists() else UnknownAdapterError
                raise refusal(message, param="adapter_path")
    raise AdapterRejectedError(f"{path[:200]!r} is not under a folder of --adapter-dirs", param="adapter_path")


def _resolved(path: Path) -> Path | None:
    """Where a path really leads; None when it cannot lead anywhere: too long, a zero byte, links in a circle."""
    try:
        resolved = path.resolve()
        resolved.is_dir()
    except (OSError, ValueError, RuntimeError):
        return None
    return resolved


def _copy_from(path: Path, roots: Sequence[Path], target: Path, limit: int) -> None:
    """Copy one file, which may be a link to another place under the roots, and must be a plain file."""
    resolved = _resolved(path)
    if resolved is None or not any(resolved.is_relative_to(root) for root in roots):
        raise AdapterRejectedError(f"{path.name} is a link out of the folders of --adapter-dirs", param="adapter_path")
    try:
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise AdapterRejectedError(f"{path.name} cannot be read: {reason}", param="adapter_path") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AdapterRejectedError(f"{path.name} is no plain file", param="adapter_path")
        _copy(file, target, limit)


def _copy(source: BinaryIO, target: Path, limit: int) -> None:
    left = limit
    with target.open("wb") as file:
        while block := source.read(_BLOCK):
            left -= len(block)
            if left < 0:
                raise PayloadTooLargeError(f"{target.name} has more than {limit} bytes")
            file.write(block)
