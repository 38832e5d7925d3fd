"""Protobuf's wire format, walked without an object for each item: 60 MB of empty messages would become gigabytes.

https://protobuf.dev/programming-guides/encoding. Groups, which no message of Tinker's has, are refused.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shared.errors import InvalidRequestError

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


class WireField(NamedTuple):
    """A field of a message, as its number and where its value stands."""

    number: int
    is_bytes: bool  # a text, bytes, a message, or a packed list
    start: int
    end: int


def fields(body: bytes, start: int, end: int) -> Iterator[WireField]:
    """The fields of the message that stands there; InvalidRequestError where it is none."""
    at = start
    while at < end:
        tag, at = varint(body, at, end)
        kind, size = tag & 7, 0
        if kind == _BYTES:
            size, at = varint(body, at, end)
        elif kind == _VARINT:
            size = varint(body, at, end)[1] - at
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise _malformed()
        if at + size > end:
            raise _malformed()
        yield WireField(tag >> 3, kind == _BYTES, at, at + size)
        at += size


def varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _malformed()


def check_items(body: bytes, message: str, described: Mapping[str, Mapping[int, str]], most: int) -> None:
    """InvalidRequestError for a message of more items than this: fields at any depth, and places of packed lists.

    `described`: of each message its fields' kinds by number, `*` before those of lists; what is not described is one
    item, since it is skipped.
    """
    items, waiting = 0, [(message, 0, len(body))]
    while waiting:
        name, start, end = waiting.pop()
        kinds = described[name]
        for field in fields(body, start, end):
            kind = kinds.get(field.number, "")
            items += 1
            if field.is_bytes and kind.strip("*?") in described:
                waiting.append((kind.strip("*?"), field.start, field.end))
            elif field.is_bytes and kind.startswith("*"):
                items += field.end - field.start
            if items > most:
                raise InvalidRequestError(f"the body has more than {most} items: send fewer data at a time")


def _malformed() -> InvalidRequestError:
    return InvalidRequestError("the body is no protobuf message of this request")
