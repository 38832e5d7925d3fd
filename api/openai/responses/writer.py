"""One response while its tokens come in: its items, its events, the object that a client sees."""

from typing import Any

import msgspec

from api.generation.choice import Choice, Delta, RequestPlan, ends_with_stop_token, usage
from api.generation.logprobs import ChatLogprob, TokenNames
from api.openai.responses.body import ENCRYPTED, ResponseRequest
from api.openai.responses.items import Event, ItemWriter
from api.openai.responses.tools import shown_tool
from api.openai.tools import UnservedTool
from shared.frames import Finish, TokenEvent
from shared.redis.kept.response_store import ResponseState
from shared.text.codec import TextCodec
from shared.text.languages.pieces import ReplyPiece
from shared.token_events import by_token, join


class ResponseWriter:
    """One response while its tokens come in."""

    def __init__(self, body: ResponseRequest, plan: RequestPlan, codec: TextCodec) -> None:
        self._body = body
        self._plan = plan
        self._names = TokenNames(codec, by_id=False)
        calls = plan.id.rpartition("-")[2]
        self.name = plan.sequences.name or calls
        self._writer = ItemWriter(self.name, calls[:24], body.tools or (), seals=ENCRYPTED in (body.include or ()))
        self._finish: Finish | None = None
        self.choice = Choice(plan, codec)
        self.tokens: list[int] = []  # of the answer so far

    @property
    def id(self) -> str:
        """The response's id. Those of its items have its name in them, too (`references.py`)."""
        return f"resp_{self.name}"

    @property
    def output(self) -> list[dict[str, Any]]:
        """Items of the response so far."""
        return self._writer.items

    def whole(self, events: list[TokenEvent]) -> bytes:
        """JSON of the response that all of its events make; with log-probabilities token by token, which says whose
        they are."""
        for event in by_token(events) if self._body.wants_logprobs else [join(events)]:
            self.take(self.choice.take([event]))
        return msgspec.json.encode(self.shown())

    def take(self, delta: Delta) -> list[Event]:
        """The events of a delta."""
        self.tokens += delta.tokens
        logprobs = self._logprobs(delta) if self._body.wants_logprobs else ()
        events = self._writer.take(delta.piece or ReplyPiece(content=delta.text), logprobs)
        if delta.finish is not None:
            self._finish = delta.finish
            events += self._writer.end(incomplete=delta.finish.reason == "length")
        return events

    def _logprobs(self, delta: Delta) -> list[ChatLogprob]:
        """Log-probabilities of the delta's tokens that may be text: neither a stop token nor a mark."""
        tokens, finish = delta.tokens, delta.finish
        if finish is not None and ends_with_stop_token(tokens, finish, self._plan.eos_token_ids):
            tokens = tokens[:-1]
        logprobs = self._names.chat(tokens, delta.logprobs[: len(tokens)], delta.top_logprobs)
        marks = () if self._plan.split is None else self._plan.split.marks
        return [each for each in logprobs if each.token not in marks]

    @property
    def status(self) -> ResponseState:
        """One of in_progress, completed and incomplete."""
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._finish.reason == "length" else "completed"

    def shown(self, **changed: Any) -> dict[str, Any]:
        """The response object as it is now."""
        body, cut = self._body, self.status == "incomplete"
        given = body.model_dump(by_alias=True, exclude_none=True, include={"tool_choice"})
        wanted = body.text.format if body.text is not None else None
        verbosity = body.text.verbosity if body.text is not None else None
        shown_verbosity = {} if verbosity is None else {"verbosity": verbosity}
        shown_format = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._plan.created,
            "status": self.status,
            "background": bool(body.background),
            **({} if body.conversation is None else {"conversation": {"id": body.conversation.id}}),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._plan.model,
            "output": self._writer.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            **({} if body.service_tier is None else {"service_tier": "default"}),
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": shown_format, **shown_verbosity},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [shown_tool(tool) for tool in body.tools or () if not isinstance(tool, UnservedTool)],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            **({} if body.max_tool_calls is None else {"max_tool_calls": body.max_tool_calls}),
            "metadata": body.metadata or {},
            **({} if body.user is None else {"user": body.user}),
            **({} if self._finish is None else {"usage": self._usage()}),
            **changed,
        }

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._plan, [self.choice])
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.choice.reasoning},
            "total_tokens": counts.total_tokens,
        }
