"""What a worker remembers of one claimed sequence, from claim to commit.

Tokens arrive as events from the engine. They go three ways: into frames for the api that streams them, into the
sequence's log in chunks, and, at the end, into the result that is committed. `attempt` of everything written is
the claim's, so a later owner's writes win.
"""

import time
from dataclasses import dataclass, field

from shared.frames import TokenEvent
from shared.redis.token_frames import Commit
from shared.results import result_of
from shared.sequences import Claim, Timings


def now_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass
class Running:
    """One claimed sequence: its events so far, and which of them the log has."""

    claim: Claim
    api: str
    started_ms: int
    first_token_ms: int = 0
    occupies_row: bool = True  # false once the engine has finished it and only the commit is left
    events: list[TokenEvent] = field(default_factory=list)
    logged: int = 0  # events[:logged] are in the log
    unlogged_tokens: int = 0
    last_event_s: float = 0.0  # monotonic; 0: the engine has not spoken of it yet

    @classmethod
    def after(cls, claim: Claim, prior: list[TokenEvent]) -> "Running":
        """A fresh claim, or one taken over with the `prior` tokens of earlier attempts.

        Prior events may have been read from an api's frame stream, which is short-lived, so they count as
        unlogged: the log gets them again under this attempt, and readers drop what they have.
        """
        for event in prior:
            event.attempt = claim.attempt
        tokens = sum(len(event.tokens) for event in prior)
        return cls(claim, claim.spec.api, now_ms(), events=list(prior), unlogged_tokens=tokens)

    @property
    def id(self) -> str:
        """The sequence's id."""
        return self.claim.spec.id

    def add(self, event: TokenEvent) -> None:
        """Take a new event of the engine."""
        if event.tokens and not self.first_token_ms:
            self.first_token_ms = now_ms()
        self.events.append(event)
        self.unlogged_tokens += len(event.tokens)

    def take_chunk(self) -> list[TokenEvent]:
        """The events that the log lacks, which from now on count as logged."""
        chunk = self.events[self.logged :]
        self.logged = len(self.events)
        self.unlogged_tokens = 0
        return merged(chunk)

    def log_anew(self) -> None:
        """The log has lost something: nothing of it counts."""
        self.logged = 0
        self.unlogged_tokens = sum(len(event.tokens) for event in self.events)

    def commit(self, worker_id: str) -> Commit:
        """The commit of a sequence whose last event carries `finish`."""
        spec = self.claim.spec
        timings = Timings(spec.enqueued_ms, self.started_ms, self.first_token_ms, now_ms())
        result = result_of(spec, self.claim.attempt, worker_id, self.events, timings)
        return Commit(claim=self.claim, result=result, last=self.take_chunk(), said=self.events)


def merged(events: list[TokenEvent]) -> list[TokenEvent]:
    """The same tokens in fewer events: neighbours of one version become one.

    Events with text stay apart: a client that resumes inside one could not be given the rest of its text.
    """
    out: list[TokenEvent] = []
    for event in events:
        last = out[-1] if out else None
        if last is None or not _joinable(last, event):
            out.append(_copy(event))
            continue
        last.tokens += event.tokens
        last.logprobs += event.logprobs
        if event.top_logprobs is not None:
            last.top_logprobs = (last.top_logprobs or []) + event.top_logprobs
        last.finish = event.finish
        last.score_logprobs = event.score_logprobs
        last.embedding = event.embedding
    return out


def _joinable(last: TokenEvent, event: TokenEvent) -> bool:
    return (
        last.finish is None
        and last.end == event.position
        and (last.version == event.version or not event.tokens)
        and last.text is None
        and event.text is None
        and (last.top_logprobs is None) == (event.top_logprobs is None)
        and event.prompt_logprobs is None
        and event.prompt_top_logprobs is None
    )


def _copy(event: TokenEvent) -> TokenEvent:
    return TokenEvent(
        event.seq,
        event.attempt,
        event.position,
        list(event.tokens),
        list(event.logprobs),
        None if event.top_logprobs is None else list(event.top_logprobs),
        event.text,
        event.version,
        event.finish,
        event.prompt_logprobs,
        event.score_logprobs,
        event.prompt_top_logprobs,
        event.embedding,
    )
