"""Taking token events apart and putting them together; tokens, in whatever pieces they travel, stay the same.

Every field of `TokenEvent` has one rule, which all functions here keep: `tokens`, `logprobs`, `top_logprobs` and
`routes` go by position, `text` is a delta, `prompt_*` come with the first event, and the finish with what comes with it
(scores, an embedding) with the last. tests/unit/test_token_events.py fails for a field that has no rule.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy

from shared.frames import TokenEvent, is_fence


def join(events: list[TokenEvent]) -> TokenEvent:
    """Consecutive events of one sequence as one."""
    first, last = events[0], events[-1]
    texts = [event.text for event in events]
    tops = [event.top_logprobs for event in events if event.top_logprobs is not None]
    routes = [event.routes for event in events if event.routes is not None]
    return TokenEvent(
        first.seq,
        last.attempt,
        first.position,
        [token for event in events for token in event.tokens],
        [logprob for event in events for logprob in event.logprobs],
        [top for some in tops for top in some] if tops else None,
        None if all(text is None for text in texts) else "".join(text or "" for text in texts),
        last.version,
        last.finish,
        next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None),
        last.score_logprobs,
        next((event.prompt_top_logprobs for event in events if event.prompt_top_logprobs is not None), None),
        last.embedding,
        next((event.prompt_others for event in events if event.prompt_others is not None), None),
        b"".join(routes) if routes else None,
    )


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
        if last.top_logprobs is not None:
            last.top_logprobs += event.top_logprobs or ()
        if last.routes is not None:
            last.routes += event.routes or b""
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
        and (last.routes is None) == (event.routes is None)
        and event.prompt_logprobs is None
        and event.prompt_top_logprobs is None
    )


def _copy(event: TokenEvent) -> TokenEvent:
    """One that may grow while the event stays as it is."""
    own = copy(event)
    own.tokens, own.logprobs = list(event.tokens), list(event.logprobs)
    if event.top_logprobs is not None:
        own.top_logprobs = list(event.top_logprobs)
    return own


def part(event: TokenEvent, start: int, end: int) -> TokenEvent:
    """The tokens of an event at positions [start, end), with what belongs to its first or last one.

    Text cannot be divided; it goes with the last token. (Events with text are never joined in the log, so a reader that
    has seen whole decode steps never asks for a part of one.)
    """
    if start <= event.position and end >= event.end:
        return event
    cut = slice(start - event.position, end - event.position)
    each = len(event.routes or b"") // max(1, len(event.tokens))
    is_first, is_last = start <= event.position, end >= event.end
    return TokenEvent(
        event.seq,
        event.attempt,
        start,
        event.tokens[cut],
        event.logprobs[cut],
        None if event.top_logprobs is None else event.top_logprobs[cut],
        event.text if is_last else None,
        event.version,
        event.finish if is_last else None,
        event.prompt_logprobs if is_first else None,
        event.score_logprobs if is_last else None,
        event.prompt_top_logprobs if is_first else None,
        event.embedding if is_last else None,
        event.prompt_others if is_first else None,
        None if event.routes is None else event.routes[cut.start * each : cut.stop * each],
    )


def by_token(events: Iterable[TokenEvent]) -> Iterator[TokenEvent]:
    """Events of one token each; where the worker has made the text, there are no others than its own."""
    for event in events:
        if event.text is not None or len(event.tokens) < 2:
            yield event
            continue
        for position in range(event.position, event.end):
            yield part(event, position, position + 1)


def fenced(live: Sequence[TokenEvent]) -> list[TokenEvent]:
    """The valid events of a frame stream, in its order: those without an earlier event of a newer attempt."""
    kept: list[TokenEvent] = []
    newest = 0
    for event in live:
        newest = max(newest, event.attempt)
        if event.attempt == newest and not is_fence(event):
            kept.append(event)
    return kept


def splice(logged: Sequence[TokenEvent], live: Sequence[TokenEvent], start: int) -> list[TokenEvent]:
    """One run of events without gap or repeat from position `start`, out of pieces that overlap."""
    token_at, finish_at = _index(logged, live, start)
    out: list[TokenEvent] = []
    if start == 0:
        out += [e for e in [*logged, *live] if e.position == 0 and _is_bare(e)][:1]
    position, attempt = start, 0
    while (event := token_at.get(position)) is not None and event.attempt >= attempt:
        first, attempt = position, event.attempt
        while token_at.get(position) is event:
            position += 1
        out.append(part(event, first, position))
        if out[-1].finish is not None:
            return out
    ending = finish_at.get(position)
    if ending is not None and ending.attempt >= attempt:
        out.append(part(ending, position, position))
    return out


def _index(
    logged: Sequence[TokenEvent], live: Sequence[TokenEvent], start: int
) -> tuple[dict[int, TokenEvent], dict[int, TokenEvent]]:
    """Event that gives the token at each position, and the finish after it."""
    token_at: dict[int, TokenEvent] = {}
    finish_at: dict[int, TokenEvent] = {}
    for event in logged:
        for position in range(max(start, event.position), event.end):
            token_at.setdefault(position, event)
        if event.finish is not None:
            finish_at.setdefault(event.end, event)
    in_log = set(token_at)
    for event in live:
        for position in range(max(start, event.position), event.end):
            known = token_at.get(position)
            if known is None or (position not in in_log and known.attempt < event.attempt):
                token_at[position] = event
        if event.finish is not None:
            finish_at.setdefault(event.end, event)
    return token_at, finish_at


def _is_bare(event: TokenEvent) -> bool:
    """True if the event carries prompt logprobs alone."""
    return not event.tokens and event.finish is None
