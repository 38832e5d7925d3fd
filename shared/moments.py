"""Moments as protocols write them."""

from datetime import UTC, datetime


def rfc3339(unix_s: float) -> str:
    """The Unix time by RFC 3339 in UTC, such as 2026-11-30T04:10:18Z; with microseconds unless it is whole seconds."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
