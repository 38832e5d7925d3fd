"""From token events to what one choice of a reply says next.

`RequestPlan` is plain data: all that is needed to write a reply. That of a resumable stream is stored in Redis, so that
another api process can continue it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from api.generation.free_text import TextCalls
from api.generation.sequences import UNSAMPLED, Sequences
from shared.frames import Finish, TokenEvent, TokenLogprob, TokenLogprobs, VersionSpan, spans_of
from shared.text.codec import TextCodec
from shared.text.languages.channels import splitter_of
from shared.text.languages.pieces import ReplyPiece, SplitPlan
from shared.text.languages.reasoning_count import ReasoningCount
from shared.text.languages.splitter import Splitter
from shared.token_events import join


class RequestPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: the sequences that compute it, and what its reply looks like."""

    sequences: Sequences
    created: int
    model: str  # its name in the reply
    fingerprint: str
    echo: tuple[str, ...] = ()  # prompt texts that come before their completions; (): no echo
    logprobs: int | None = None  # None: none; k: with the k most likely tokens
    prompt_logprobs: int | None = None  # likewise, as vLLM shows them
    names_tokens: bool = False  # whose log-probabilities it wants in the place of the most likely ones'
    include_usage: bool = False
    usage_so_far: bool = False  # in every chunk
    event_ids: bool = False
    token_ids: bool = False
    weight_versions: bool = False
    name_tokens_by_id: bool = False
    eos_token_ids: tuple[int, ...] = ()
    show_stop_token: bool = False  # the text of a stop token id that the request named
    split: SplitPlan | None = None  # reasoning and tool calls that are separated from content
    show_special: bool = False  # the text has special tokens in it
    predicted: bool = False  # the client has said what it expects

    @property
    def id(self) -> str:
        """Id of the request and of its reply; unique."""
        return self.sequences.id

    @property
    def shown_id(self) -> str:
        """The reply's id as its client sees it: it ends with the request's own name, where there is one."""
        return f"{self.id.partition('-')[0]}-{self.sequences.name}" if self.sequences.name else self.id

    def shown_tokens(self, codec: TextCodec) -> Iterable[str]:
        """Special tokens that the text does not hide."""
        if self.show_special:
            return codec.special_tokens
        return () if self.split is None else self.split.marks

    def call_id(self, choice: int, call: int) -> str:
        """Id of a tool call; the same in every process that writes the reply."""
        return f"call_{self.id.rpartition('-')[2][:20]}{choice:02d}{call:02d}"

    def with_prompts(self, prompts: Sequence[tuple[int, ...]]) -> "RequestPlan":
        """The plan of the same reply to other prompts."""
        return msgspec.structs.replace(self, sequences=msgspec.structs.replace(self.sequences, prompts=tuple(prompts)))

    def for_storage(self, **changed: Any) -> "RequestPlan":
        """Without what only workers read; `changed` are further fields of the template that are to be stored."""
        unread: dict[str, Any] = {"sampling": UNSAMPLED, "prediction_ids": (), "images": (), "collect": None}
        return msgspec.structs.replace(self, sequences=self.sequences.with_template(**{**unread, **changed}))


def stored_plan(stored: Mapping[str, Any]) -> RequestPlan:
    """The plan out of its JSON; also out of the older form, in which it repeated what it needed of the sequences."""
    if "sequences" not in stored:
        template: dict[str, Any] = {"id": stored["id"], "model": stored["served"], "prompt_ids": ()}
        template |= {"sampling": UNSAMPLED, "kind": "score" if stored.get("scores_only") else "generate"}
        template["deadline_ms"] = stored.get("deadline_ms", 0)
        shared = {name: stored[name] for name in ("prompts", "n", "name") if name in stored}
        sequences = {"prompts": (), **shared, "template": template, "chat": stored["endpoint"] == "chat"}
        stored = {**stored, "sequences": sequences}
    return msgspec.convert(stored, RequestPlan)


class Delta(msgspec.Struct):
    """New text and tokens of one choice."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TokenLogprobs] | None
    first: bool  # nothing of this choice was shown before
    finish: Finish | None
    seen_tokens: int = 0  # so many of `tokens` the client of a resumed stream has; of `text` only new text is here
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[TokenLogprobs] | None = None
    versions: tuple[VersionSpan, ...] = ()  # of the new tokens, when the request wants them
    piece: ReplyPiece | None = None  # new text taken apart, when the plan says so
    calls_ended_it: bool = False
    older_calls: bool = False  # OpenAI's older form of them

    @property
    def finish_reason(self) -> str | None:
        """The reason of the end under OpenAI's name."""
        if self.finish is None:
            return None
        if not self.calls_ended_it or self.finish.reason != "stop":
            return self.finish.reason
        return "function_call" if self.older_calls else "tool_calls"


def with_drawn(event: TokenEvent) -> list[TokenLogprobs]:
    """Each token's competitors, and the token itself where it is not among them."""
    tops: list[TokenLogprobs] = event.top_logprobs or [()] * len(event.tokens)
    return [
        top if any(each.token == token for each in top) else (*top, TokenLogprob(token, logprob))
        for token, logprob, top in zip(event.tokens, event.logprobs, tops, strict=True)
    ]


class ChoiceProgress(msgspec.Struct, frozen=True):
    """How much of a choice a client has seen."""

    tokens: int = 0
    chars: int = 0
    ended: bool = False
    begun: bool = False


NOTHING_SEEN = ChoiceProgress()


class Choice:
    """One choice while its events come in. With `seen` it shows only what lies beyond."""

    __slots__ = (
        "_decoder", "_eos", "_names_tokens", "_show_stop", "_skip_chars", "_skip_tokens", "_split", "_splitter",
        "_text_calls", "_thought", "_versions", "begun", "cached", "chars", "ended", "prediction", "seen_end", "tokens",
    )  # fmt: skip

    def __init__(self, plan: RequestPlan, codec: TextCodec, seen: ChoiceProgress = NOTHING_SEEN) -> None:
        self._split = plan.split
        self._splitter = None if plan.split is None else splitter_of(plan.split)
        self._text_calls = TextCalls(plan.split.custom) if plan.split is not None and plan.split.custom else None
        self._thought = None if plan.split is None else ReasoningCount(plan.split, codec)
        self._decoder = codec.stream(plan.shown_tokens(codec))
        self._eos = plan.eos_token_ids
        self._show_stop = plan.show_stop_token
        self._names_tokens = plan.names_tokens
        self._versions = plan.weight_versions
        self._skip_tokens = seen.tokens
        self._skip_chars = seen.chars
        self.begun = seen.begun  # something of it was shown
        self.seen_end = seen.ended
        self.tokens = 0
        self.chars = 0
        self.cached = 0
        self.prediction = PredictionCounts()
        self.ended = False

    @property
    def reasoning(self) -> int:
        """Tokens of reasoning, its marks included."""
        return 0 if self._thought is None else self._thought.tokens

    def take(self, events: list[TokenEvent]) -> Delta:
        """All that the events add, as one delta."""
        event = events[0] if len(events) == 1 else join(events)
        finish = event.finish
        text = self._text(event)
        self.tokens += len(event.tokens)
        self.chars += len(text)
        if finish is not None:
            self.ended = True
            self.cached = finish.cached_tokens
            self.prediction = PredictionCounts(finish.accepted_prediction_tokens, finish.rejected_prediction_tokens)
        tops = with_drawn(event) if self._names_tokens else event.top_logprobs
        delta = Delta(text, event.tokens, event.logprobs, tops, not self.begun, finish)
        delta.prompt_logprobs = event.prompt_logprobs
        delta.prompt_top_logprobs = event.prompt_top_logprobs
        if self._splitter is not None:
            self._take_apart(self._splitter, delta)
        if self._skip_tokens or self._skip_chars:
            self._skip(delta)
        if self._versions:
            delta.versions = spans_of(events, event.position + delta.seen_tokens)
        return delta

    def _text(self, event: TokenEvent) -> str:
        if event.text is not None:
            return event.text
        finish = event.finish
        if finish is None:
            return self._decoder.push(event.tokens)
        shown = event.tokens[:-1] if self._hides_last(event.tokens, finish) else event.tokens
        return self._decoder.push(shown) + self._decoder.flush()

    def _hides_last(self, tokens: list[int], finish: Finish) -> bool:
        """True if the last token ended the completion and is no part of its text."""
        return ends_with_stop_token(tokens, finish, self._eos) and not (
            self._show_stop and finish.stop_match is not None
        )

    def _take_apart(self, splitter: Splitter, delta: Delta) -> None:
        text, seen = delta.text, min(self._skip_chars, len(delta.text))
        if seen:
            before = splitter.push(text[:seen])
            if self._text_calls is not None:
                self._text_calls.take(before, ended=False)
        piece = splitter.push(text[seen:])
        if delta.finish is not None:
            piece.add(splitter.flush())
        if self._text_calls is not None:
            self._text_calls.take(piece, ended=delta.finish is not None)
        if delta.finish is not None:
            whole = bool(splitter.calls) and not splitter.in_call  # a stop string may cut a call
            delta.older_calls = self._split is not None and self._split.older
            delta.calls_ended_it = whole and self._split is not None and not self._split.named
        delta.piece = piece
        if self._thought is not None:
            self._thought.take(delta.tokens)

    def _skip(self, delta: Delta) -> None:
        delta.seen_tokens, chars = min(self._skip_tokens, len(delta.tokens)), min(self._skip_chars, len(delta.text))
        self._skip_tokens -= delta.seen_tokens
        self._skip_chars -= chars
        delta.text = delta.text[chars:]


def ends_with_stop_token(tokens: list[int], finish: Finish, eos_token_ids: tuple[int, ...]) -> bool:
    """True if a stop token ended these tokens, and no stop string or limit."""
    if finish.reason != "stop" or not tokens or isinstance(finish.stop_match, str):
        return False
    return tokens[-1] in eos_token_ids if finish.stop_match is None else tokens[-1] == finish.stop_match


DONE = b"data: [DONE]\n\n"


class PromptDetails(msgspec.Struct):
    """Prompt tokens whose KV came from the prefix cache."""

    cached_tokens: int


class PredictionCounts(msgspec.Struct, frozen=True):
    """Tokens of the client's prediction that were drafted, by whether the model drew the same."""

    accepted: int = 0
    rejected: int = 0


class CompletionDetails(msgspec.Struct):
    """Tokens of the completions that a client might not expect."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None  # of a request with a prediction, or that may reason


def usage(plan: RequestPlan, choices: Sequence[Choice]) -> Usage:
    """Counts; a prompt counts once, however many samples it has."""
    n = plan.sequences.n
    prompt = sum(map(len, plan.sequences.prompts))
    completion = sum(choice.tokens for choice in choices)
    cached = sum(max(choice.cached for choice in choices[p : p + n]) for p in range(0, len(choices), n))
    details = None
    if plan.predicted or (plan.split is not None and plan.split.think_end):
        details = CompletionDetails(
            sum(choice.reasoning for choice in choices),
            sum(choice.prediction.accepted for choice in choices),
            sum(choice.prediction.rejected for choice in choices),
        )
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached), details)


def shown_versions(spans: Sequence[VersionSpan]) -> list[dict[str, Any]]:
    """Version spans by field name; `version` "" is the base."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
