"""The choice between fetching KV and computing it, by what both have taken lately. Pure."""

from dataclasses import dataclass

LEAST_IDS = 128  # fewer are computed: even the question takes a while
ROUND_TRIPS_S = 0.02  # a connection, a handshake, a question, and a turn of both engines
RECENT = 0.5  # weight of the latest transfer


@dataclass(frozen=True)
class FetchSize:
    """Prompt ids and bytes that a fetch would bring."""

    ids: int
    nbytes: int


def is_quicker(job: FetchSize, token_s: float, bytes_per_s: float) -> bool:
    """True if fetching beats computing. What is unmeasured (0) favours a fetch, whose first parcel then measures it."""
    if job.ids < LEAST_IDS:
        return False
    if not token_s or not bytes_per_s:
        return True
    return ROUND_TRIPS_S + job.nbytes / bytes_per_s < job.ids * token_s


def goes_on(job: FetchSize, done_bytes: int, seconds: float, token_s: float) -> bool:
    """True if the rest of a transfer is quicker than computing what it would bring."""
    left = max(0, job.nbytes - done_bytes)
    if not token_s or not left or not done_bytes:
        return True
    return left * seconds / done_bytes < job.ids * token_s * left / job.nbytes


def recent(before: float, now: float) -> float:
    """A running mean that begins with the first value."""
    return RECENT * now + (1 - RECENT) * before if before else now
