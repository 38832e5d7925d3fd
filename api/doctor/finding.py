"""One result of a check."""

from typing import Literal

import msgspec

Status = Literal["ok", "note", "wrong"]


class Finding(msgspec.Struct, frozen=True):
    """A finding of a check; `do` says what to do about it. "wrong" keeps a ring from running, "note" does not."""

    check: str
    status: Status
    found: str
    do: str = ""


def ok(check: str, found: str) -> Finding:
    """A finding that all is well."""
    return Finding(check, "ok", found)


def note(check: str, found: str, do: str = "") -> Finding:
    """It works, and would work better otherwise; or it could not be found out."""
    return Finding(check, "note", found, do)


def wrong(check: str, found: str, do: str) -> Finding:
    """It will not work like this."""
    return Finding(check, "wrong", found, do)
