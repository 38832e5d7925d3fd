"""Large files of a model from the hub: continued where they were cut off, checked, and fetched by one process."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from mlx_model.hub import LargeFile

BYTES = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(BYTES).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """A hub with one file, which it sends up to `gives` bytes of."""

    gives: ClassVar[list[int]] = []  # of each answer to come; then all
    asked: ClassVar[list[str]] = []  # ranges

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.headers["Range"])
        begin = 0 if self.path == "/whole" else int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.send_response(200 if self.path == "/whole" else 206)
        self.send_header("Content-Length", str(len(BYTES) - begin))
        self.end_headers()
        self.wfile.write(BYTES[begin:][: self.gives.pop(0) if self.gives else None])


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.gives, Hub.asked = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["/ranges", "/whole"])
def test_a_file_that_was_cut_off_is_continued(tmp_path: Path, hub: str, path: str) -> None:
    file, blobs = LargeFile(hub + path, len(BYTES), SHA256, {}), tmp_path / "blobs"
    Hub.gives[:] = [100_000, 0]  # the second try brings nothing, so the fetch ends
    if path == "/ranges":
        with pytest.raises(httpx.TransportError):
            file.fetch(blobs)
    file.fetch(blobs)
    assert (blobs / SHA256).read_bytes() == BYTES and len(list(blobs.iterdir())) == 1
    if path == "/ranges":
        assert Hub.asked == ["bytes=0-", "bytes=100000-", "bytes=100000-"]
    Hub.asked.clear()
    file.fetch(blobs)
    assert not Hub.asked, "it is here"


def test_a_file_of_another_hash_is_refused_and_removed(tmp_path: Path, hub: str) -> None:
    with pytest.raises(OSError, match="another one than announced"):
        LargeFile(f"{hub}/ranges", len(BYTES), "0" * 64, {}).fetch(tmp_path)
    with pytest.raises(OSError, match=f"it has {len(BYTES)} bytes of {len(BYTES) - 1}"):
        LargeFile(f"{hub}/ranges", len(BYTES) - 1, SHA256, {}).fetch(tmp_path)
    assert not any(path.suffix == "" for path in tmp_path.iterdir())
