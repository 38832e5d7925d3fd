"""A message while its tokens come in: whole, or what opens and ends the stream of its events."""

from typing import Any

import msgspec

from api.anthropic.blocks import BlockWriter, Event
from api.anthropic.body import MessagesRequest
from api.generation.choice import Choice, Delta, RequestPlan, usage
from shared.frames import Finish, TokenEvent
from shared.text.codec import TextCodec
from shared.text.languages.pieces import ReplyPiece
from shared.token_events import join

SHOWN_FIELDS = {"max_tokens", "thinking", "context_management", "diagnostics"}
"""The fields of a request that say how its answer is shown: with them alone a MessageWriter writes the same."""


class MessageWriter:
    """One message while its tokens come in."""

    def __init__(
        self, body: MessagesRequest, plan: RequestPlan, codec: TextCodec, *, fills_context: bool, tier: str = "standard"
    ) -> None:
        self._body = body
        self._plan = plan
        self._fills_context = fills_context  # `max_tokens` is more than the context leaves
        self._tier = tier
        self._finish: Finish | None = None
        self._called = False
        name = plan.id.rpartition("-")[2]
        omits = body.thinking is not None and body.thinking.omits_text
        self._writer = BlockWriter(name[:22], shows_thinking=not omits)
        self._choice = Choice(plan, codec)
        self.id = f"msg_{plan.sequences.name or name}"

    def whole(self, tokens: list[TokenEvent]) -> bytes:
        """JSON of the message that all of its tokens make."""
        self.take([join(tokens)])
        return msgspec.json.encode(self._message(self._writer.blocks, **self._ending(), usage=self._usage()))

    def start(self) -> bytes:
        """The first events of a stream; what came from the cache is known at its end."""
        counts = {**self._usage(), "input_tokens": len(self._plan.sequences.prompts[0]), "output_tokens": 0}
        message = self._message([], stop_reason=None, stop_sequence=None, usage=counts)
        return lines([{"type": "message_start", "message": message}]) + PING

    def take(self, tokens: list[TokenEvent]) -> list[Event]:
        """The events of tokens that have come."""
        delta: Delta = self._choice.take(tokens)
        events = self._writer.take(delta.piece or ReplyPiece(content=delta.text)) if self._body.max_tokens else []
        if delta.finish is not None:
            self._finish, self._called = delta.finish, delta.calls_ended_it
            events += self._writer.end()
        return events

    def last(self) -> bytes:
        """The last events of a stream."""
        ending = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        if self._body.context_management is not None:
            ending["context_management"] = {"applied_edits": []}
        return lines([ending, {"type": "message_stop"}])

    def _message(self, content: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.model,
            "content": content,
            **more,
        }
        if self._body.context_management is not None:
            shown["context_management"] = {"applied_edits": []}
        if (self._body.diagnostics or {}).get("previous_message_id") is not None:
            shown["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}}
        return shown

    def _ending(self) -> dict[str, Any]:
        finish = self._finish
        assert finish is not None, "asked before the end"
        match = finish.stop_match if isinstance(finish.stop_match, str) else None
        if not self._body.max_tokens:  # a token was drawn, and belongs to no block
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._called and finish.reason == "stop":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if match is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": match}
        if finish.reason == "stop":
            return {"stop_reason": "end_turn", "stop_sequence": None}
        full = self._fills_context and finish.reason == "length"
        return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._plan, [self._choice])
        cached = counts.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": counts.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": min(counts.completion_tokens, self._body.max_tokens),
            "output_tokens_details": {"thinking_tokens": self._choice.reasoning},
            "service_tier": self._tier,
        }


def lines(events: list[Event]) -> bytes:
    """The events as bytes of a stream."""
    return b"".join(to_bytes(msgspec.json.encode(event), event["type"]) for event in events)


def to_bytes(data: bytes, name: str) -> bytes:
    """One event; `data` is its JSON."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


PING = lines([{"type": "ping"}])
