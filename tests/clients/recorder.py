"""A server before the server, which writes down what it passes on: bodies of POST requests, numbered in their order."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

PASSED = ("authorization", "content-type", "accept", "anthropic-version", "anthropic-beta", "x-api-key", "user-agent")


@contextlib.contextmanager
def recorder(url: str, folder: Path) -> Iterator[str]:
    """The address to ask in place of `url`. A file of JSON says path, headers and body of one request."""
    folder.mkdir(parents=True, exist_ok=True)
    lock, count = threading.Lock(), iter(range(10**6))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_HEAD(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            with lock:
                number = next(count)
            told = {"path": self.path, "headers": self._passed(), "body": json.loads(body or b"null")}
            (folder / f"{number:04d}.json").write_text(json.dumps(told))
            self._pass_on(body)

        def _passed(self) -> dict[str, str]:
            return {name: value for name in PASSED if (value := self.headers.get(name))}

        def _pass_on(self, body: bytes) -> None:
            with httpx.stream(
                self.command, url + self.path, headers=self._passed(), content=body, timeout=None, trust_env=False
            ) as answer:
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                for data in answer.iter_raw():
                    self.wfile.write(data)
                    self.wfile.flush()

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
