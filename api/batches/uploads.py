"""The form of an upload, whose part `file` is a file with and without a name."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser

MAX_FIELDS = 8
MAX_FIELD_BYTES = 4096


class _UploadParser(MultiPartParser):
    """Starlette takes a part without a file name for text, and decodes it; clients send bytes in this way."""

    def on_headers_finished(self) -> None:
        """Called when a part's own headers are there."""
        part = self._current_part
        _, options = parse_options_header(part.content_disposition)
        if options.get(b"name") == b"file" and b"filename" not in options:
            part.content_disposition = (part.content_disposition or b"") + b'; filename=""'
        super().on_headers_finished()


@contextlib.asynccontextmanager
async def upload_form(request: Request) -> AsyncIterator[FormData]:
    """The form; its file is spooled to disk, and deleted after this."""
    try:
        async with contextlib.aclosing(request.stream()) as stream:
            parser = _UploadParser(
                request.headers, stream, max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
            )
            form = await parser.parse()
    except MultiPartException as error:
        raise HTTPException(400, error.message) from error
    try:
        yield form
    finally:
        await form.close()
