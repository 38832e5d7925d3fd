"""Bounds on what a client may send, checked before anything is parsed."""

import asyncio
import re
import time
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.callers.fair_pool import aside
from api.http.errors import BodyError, error_response
from shared.errors import BodyTimeoutError, InvalidRequestError, ParallmError, PayloadTooLargeError
from shared.process.api_settings import ApiSettings

MAX_JSON_DEPTH = 64
VALUES_PER_OBJECT = 20  # an object costs more to check than a number: so many times fewer of them are taken
VALUES_PER_LIST = 4
FEW_OBJECTS = 1000  # or lists, are always taken
BODY_WITHIN_S = 30.0  # of everything but uploads
PASSES = "/api/v1/forward_backward"  # which may come as protobuf, whose shape is no JSON's
NUMBERS = ("/v1/training/update", PASSES, "/api/v1/forward")  # long bodies of many token ids and log-probabilities
PROTOBUF = "application/x-protobuf"
REQUESTS = "/v1/messages/batches"  # a body of many requests, each of which its route looks at by itself
MAX_REQUESTS_BYTES = 64 << 20  # of them, which are in memory at once; --max-upload-bytes if that is less
MAX_FORM_BYTES = 128 << 10  # a form is read in the event loop; the longest text of ours takes 48 KiB of one
BYTES_PER_NUMBER = 8
BYTES_PER_OBJECT = 512
SAMPLES = "/api/v1/asample"
# Take images as `data:` URLs or base64, which may be long
IMAGES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/jobs",
        "/api/chat",
        "/api/generate",
        SAMPLES,
    }
)
LARGE_BYTES = 1 << 18  # of a body: to look at its shape takes some 10 ms from here on

UPLOADS = re.compile(
    r"/v1/files|/v1/jobs|/v1/adapters|/v1/adapters/[^/]+/versions|/upload_adapter|/update_adapter_weights"
)
_UNSAID = ("", "application/x-www-form-urlencoded")  # what `curl -d` says: only the dashboard takes such forms
_IMAGE = re.compile(
    rb'"(?:url|image_url|location)"\s*+:\s*+"(data:)|"data"\s*+:\s*+"|"images"\s*+:\s*+(\[)\s*+"', re.IGNORECASE
)
_NEXT_IMAGE = re.compile(rb'\s*+,\s*+"')  # of a list
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)  # possessive: one pass, whatever the text
# A piece of JSON that is taken in one call, so that other threads get a turn in between; it never ends in a string.
_PIECE = re.compile(rb'(?:[^"]++|"(?:[^"\\]++|\\.?)*+(?:"|\Z)){1,10000}+', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


class BodyLimit:
    """Bounds request bodies: by Content-Length, while reading, and JSON by its depth and its number of values.

    Uploads are multipart bodies, which their routes stream to disk; they have a bound of their own. To any other route
    a multipart body is one like all others: it would be read into memory. A body of no said type is JSON.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        if headers.get("content-type", "") in _UNSAID and not scope["path"].startswith("/dashboard"):
            headers["content-type"] = "application/json"
        upload = is_multipart(headers) and UPLOADS.fullmatch(scope["path"]) is not None
        limit = most_bytes(self._settings, scope["path"], upload=upload)
        detail = f"the body is larger than {limit} bytes"
        if scope["path"] == "/v1/jobs" and not upload:
            detail += "; upload many prompts as JSONL (multipart/form-data)"
        length = headers.get("content-length", "")
        numbered = scope["path"] == PASSES and is_protobuf(headers)  # its route looks whose it was
        if length.isdigit() and int(length) > limit and not numbered:
            await error_response(PayloadTooLargeError(detail))(scope, receive, send)
            return
        read, until = 0, time.monotonic() + BODY_WITHIN_S
        held: list[bytes] | None = None if upload else []  # until the whole body has been looked at

        async def bounded() -> Message:
            nonlocal read, held
            while True:
                message = await (receive() if held is None else _in_time(receive, until))
                if message["type"] != "http.request":
                    return message
                read += len(message.get("body", b""))
                if read > limit:
                    raise BodyError(PayloadTooLargeError(detail), b"".join((held or [])[:4]))
                if held is None:
                    return message
                held.append(message.get("body", b""))
                if not message.get("more_body"):
                    pieces, held = held, None
                    join = partial(_joined, pieces)
                    body = await aside(join) if read > LARGE_BYTES else join()
                    try:
                        check = partial(self._check, body, scope["path"])
                        await aside(check) if read > LARGE_BYTES else check()
                    except ParallmError as error:
                        raise BodyError(error, body) from error
                    return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, bounded, send)

    def _check(self, body: bytes, path: str) -> None:
        if len(body) > self._settings.max_request_bytes and path in IMAGES:
            check_without_images(body, self._settings.max_request_bytes)
        if path not in NUMBERS and path != REQUESTS:
            check_shape(body, self._settings.max_json_values)


def most_bytes(settings: ApiSettings, path: str, *, upload: bool = False) -> int:
    """Largest body that a route takes, in bytes."""
    if upload:
        return settings.max_upload_bytes
    if path in NUMBERS:
        return settings.max_training_bytes
    if path in IMAGES:
        return max(settings.max_request_bytes, settings.max_image_request_bytes)
    if path.startswith("/dashboard"):
        return min(settings.max_request_bytes, MAX_FORM_BYTES)
    if path == REQUESTS:
        return max(settings.max_request_bytes, min(settings.max_upload_bytes, MAX_REQUESTS_BYTES))
    return settings.max_request_bytes


def most_numbers(settings: ApiSettings) -> tuple[int, int]:
    """Values and objects of a body of NUMBERS; its shape is checked where it is read (api/checks/body_readers.py)."""
    limit = settings.max_training_bytes
    return max(settings.max_json_values, limit // BYTES_PER_NUMBER), max(FEW_OBJECTS, limit // BYTES_PER_OBJECT)


def is_protobuf(headers: Headers) -> bool:
    """True if a body is one of Tinker's messages."""
    return headers.get("content-type", "") == PROTOBUF


def _joined(pieces: list[bytes]) -> bytes:
    """The body; what is long is copied without the interpreter's lock."""
    body = b"".join(pieces)
    pieces.clear()  # else it would be there twice
    return body


def is_multipart(headers: Headers) -> bool:
    """True if a body is a form with files; the name of a media type may be written in any case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"


async def _in_time(receive: Receive, until: float) -> Message:
    try:
        async with asyncio.timeout(until - time.monotonic()):
            return await receive()
    except TimeoutError:
        raise BodyError(BodyTimeoutError(f"the body did not arrive within {BODY_WITHIN_S:g} s")) from None


def check_without_images(body: bytes, most: int) -> None:
    """PayloadTooLargeError for a body that has more bytes than this besides the `data:` URLs of its images."""
    beside, at, in_list = len(body), 0, False
    while True:
        following = _NEXT_IMAGE.match(body, at) if in_list else None
        found = following or _IMAGE.search(body, at)
        if found is None:
            break
        in_list = following is not None or bool(found[2])
        at = found.end()
        end = body.find(b'"', at)
        if end < 0:
            break
        is_url = following is None and found[1]
        if body.find(b"\\", at, end) < 0 and (is_url or not body[at:end].translate(None, _BASE64)):
            beside -= end - at
            at = end + 1
    if beside > most:
        raise PayloadTooLargeError(f"the body is larger than {most} bytes, even without its images")


def check_shape(body: bytes, max_values: int, max_objects: int = 0) -> None:
    """InvalidRequestError for JSON nested too deep, or of too many values or objects; whether it is JSON is not asked.

    Linear in the body's length: strings are cut out, and what is left is looked at by counting and replacing.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH and body.count(b",") < max_values:
        return
    bare = _bare(body)
    if bare.count(b",") >= max_values:
        raise InvalidRequestError(f"the body has more than {max_values} values (--max-json-values)")
    max_objects = max_objects or max(FEW_OBJECTS, max_values // VALUES_PER_OBJECT)
    if (objects := bare.count(b"{")) > max_objects:
        raise InvalidRequestError(f"the body has {objects} objects, and {max_objects} is the limit (--max-json-values)")
    if (lists := bare.count(b"[")) > max(FEW_OBJECTS, max_values // VALUES_PER_LIST):
        raise InvalidRequestError(f"the body has {lists} lists, too many for {max_values} values (--max-json-values)")
    if _is_deep(bare):
        raise InvalidRequestError(f"the body is nested deeper than {MAX_JSON_DEPTH} levels")


def is_deep(text: bytes) -> bool:
    """True if JSON, which may be a line of an upload, is nested deeper than any valid body."""
    return text.count(b"[") + text.count(b"{") > MAX_JSON_DEPTH and _is_deep(_bare(text))


def _bare(body: bytes) -> bytes:
    return b"".join(_STRING.sub(b"", piece[0]) for piece in _PIECE.finditer(body))


def _is_deep(bare: bytes) -> bool:
    brackets = bare.translate(_ONE_KIND, _NOT_BRACKETS)
    for _ in range(MAX_JSON_DEPTH):
        brackets = brackets.replace(b"[]", b"")  # takes the innermost level off
    return b"[" in brackets
