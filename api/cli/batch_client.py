"""The client for files and batches (docs/reference/batches.md): from a file of requests to a file of answers."""

import uuid
from collections.abc import AsyncGenerator, Callable
from typing import IO, Any

import httpx
import msgspec

from api.cli.client import InferenceClient, Listing, poll
from api.cli.http import decode, reached

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class FileInfo(msgspec.Struct, frozen=True):
    """A file on the server; times are Unix seconds."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int


class BatchCounts(msgspec.Struct, frozen=True):
    """Lines of a batch, by their state."""

    total: int
    completed: int
    failed: int


class BatchLineError(msgspec.Struct, frozen=True):
    """Fault in the input file of a batch; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchLineErrors(msgspec.Struct, frozen=True):
    """Faults for which a whole batch has failed."""

    data: list[BatchLineError]


class BatchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, as OpenAI shows it; times are Unix seconds."""

    id: str
    endpoint: str
    model: str | None
    status: str
    errors: BatchLineErrors | None
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    completion_window: str
    created_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    expires_at: int
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: dict[str, Any] | None  # of the answered lines, when the batch has ended
    metadata: dict[str, str] | None

    @property
    def ended(self) -> bool:
        """True in a state that a batch does not leave."""
        return self.status in ENDED


class BatchClient(InferenceClient):
    """An asynchronous client for files and batches, besides everything else."""

    async def upload(self, name: str, file: IO[bytes], expires_after_s: int = 0) -> FileInfo:
        """Send a seekable file of requests; `expires_after_s` 0 leaves its time to live to the server."""
        fields = {"purpose": "batch"}
        if expires_after_s:
            fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}

        async def send() -> httpx.Response:
            file.seek(0)
            return await self._http.post("/v1/files", data=fields, files={"file": (name, file, "application/jsonl")})

        return decode(await self._patiently(send), FileInfo)

    async def create(
        self, input_file_id: str, endpoint: str, window: str = "24h", metadata: dict[str, str] | None = None
    ) -> BatchInfo:
        """Start a batch, once: a request whose answer was lost is repeated under the same idempotency key."""
        body: dict[str, Any] = {"input_file_id": input_file_id, "endpoint": endpoint, "completion_window": window}
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        body |= {"metadata": metadata} if metadata else {}
        return decode(
            await self._patiently(lambda: self._http.post("/v1/batches", json=body, headers=headers)), BatchInfo
        )

    async def batch(self, batch_id: str) -> BatchInfo:
        """How far a batch is."""
        return await self.call("GET", f"/v1/batches/{batch_id}", BatchInfo)

    async def batches(self, limit: int = 20) -> list[BatchInfo]:
        return (await self.call("GET", "/v1/batches", Listing[BatchInfo], limit=limit)).data

    async def cancel_batch(self, batch_id: str) -> BatchInfo:
        """Ask a batch to end; what is answered stays."""
        return await self.call("POST", f"/v1/batches/{batch_id}/cancel", BatchInfo)

    async def wait_batch(self, batch_id: str, on_progress: Callable[[BatchInfo], None] | None = None) -> BatchInfo:
        """Poll until the batch has ended."""
        return await poll(lambda: self.batch(batch_id), ENDED, on_progress)

    async def content(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """A file's bytes, as they come."""
        async with reached(self.url, self._http.stream("GET", f"/v1/files/{file_id}/content")) as response:
            async for data in response.aiter_bytes():
                yield data

    async def files(self, limit: int = 20, purpose: str = "") -> list[FileInfo]:
        return (await self.call("GET", "/v1/files", Listing[FileInfo], limit=limit, purpose=purpose)).data

    async def delete_file(self, file_id: str) -> None:
        await self.call("DELETE", f"/v1/files/{file_id}", dict[str, Any])
