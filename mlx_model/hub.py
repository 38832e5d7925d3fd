"""Fetches a model of the hub into the cache of the hub's library, so that a killed process loses nothing.

The library gives each try of a file a new name, so that what came before is lost, and stays on the disk; and it checks
sizes, no hashes. So large files are fetched here first, in order and under a lock, and checked; the library finds them
in its cache, fetches the small ones, and links all of them.
"""

import contextlib
import fcntl
import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx
import mlx_lm.utils

from shared.process.model_aliases import hub_folder

LARGE_BYTES = 8 << 20  # of a file that is fetched here
STALE_S = 600.0  # without a write, until what the library has begun of a file counts as left behind
SILENT_S = 30.0  # of the hub, until a try ends
_HASH, _SHA256 = re.compile(r"[0-9a-f]{40,64}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class LargeFile:
    """A file that is on the hub and not here."""

    url: str
    size: int
    etag: str  # names its blob; the SHA-256 of a file in large file storage
    headers: dict[str, str]

    def fetch(self, blobs: Path) -> None:
        """Fetch what is missing of it; OSError or httpx.HTTPError where that cannot be, and what came stays."""
        blobs.mkdir(parents=True, exist_ok=True)
        whole, part = blobs / self.etag, blobs / f"{self.etag}.parallm.incomplete"
        with part.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # of two processes the second one finds it whole
            if whole.exists():
                return
            for left in blobs.glob(f"{self.etag}.*.incomplete"):
                with contextlib.suppress(OSError):
                    if left != part and time.time() - left.stat().st_mtime > STALE_S:
                        left.unlink()
            while (begin := file.seek(0, 2)) < self.size:
                try:
                    self._continue(file, begin)
                except httpx.TransportError:  # cut off: once more, as long as something comes
                    if file.seek(0, 2) == begin:
                        raise
            file.flush()
            self._check(part)
            part.rename(whole)

    def _continue(self, file: BinaryIO, begin: int) -> None:
        headers = {**self.headers, "Range": f"bytes={begin}-", "Accept-Encoding": "identity"}
        with httpx.stream("GET", self.url, headers=headers, follow_redirects=True, timeout=SILENT_S) as answer:
            answer.raise_for_status()
            if begin and answer.status_code != httpx.codes.PARTIAL_CONTENT:
                file.truncate(0)  # it sends all of it
            for piece in answer.iter_bytes():
                file.write(piece)

    def _check(self, part: Path) -> None:
        found = part.stat().st_size
        if found == self.size and _SHA256.fullmatch(self.etag):
            with part.open("rb") as file:
                found_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if found_sha256 == self.etag:
                return
            why = f"its SHA-256 is {found_sha256}, and the hub names {self.etag}"
        elif found == self.size:
            return
        else:
            why = f"it has {found} bytes of {self.size}"
        part.unlink()
        raise OSError(f"a file that came is another one than announced: {why}")


def fetch(name: str) -> Path:
    """The folder of a model of the hub, which is fetched unless it is here."""
    for file in _large_files(name):
        file.fetch(hub_folder(name) / "blobs")
    return Path(mlx_lm.utils._download(name))


def _large_files(name: str) -> list[LargeFile]:
    """Those that are missing; none where the hub does not answer: the library says what that means."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.utils._headers import build_hf_headers

    found = []
    with contextlib.suppress(Exception):
        files = snapshot_download(name, allow_patterns=mlx_lm.utils.DEFAULT_ALLOW_PATTERNS, dry_run=True)
        for each in files:
            if isinstance(each, str) or not each.will_download or (each.file_size or 0) < LARGE_BYTES:
                continue
            url = hf_hub_url(name, each.filename, revision=each.commit_hash)
            known = get_hf_file_metadata(url)
            if known.size and known.etag and _HASH.fullmatch(known.etag):
                found.append(LargeFile(url, known.size, known.etag, build_hf_headers()))
    return found
