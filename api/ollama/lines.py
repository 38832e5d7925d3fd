"""The lines of an answer while its tokens come in: each a JSON object, the last one with `done` and the counts."""

import time
from typing import Any, Literal

import msgspec

from api.generation.choice import Choice, Delta, RequestPlan
from api.generation.logprobs import TokenNames
from api.http.fields import rfc3339
from shared.frames import Finish, TokenEvent
from shared.text.codec import TextCodec
from shared.text.languages.pieces import CallPart, ReplyPiece

Kind = Literal["chat", "generate"]


def now() -> str:
    """The time as Ollama writes it."""
    return rfc3339(time.time())


def loaded(kind: Kind, model: str, *, leaves: bool) -> dict[str, Any]:
    """The answer to a request without anything to say, which only has the model loaded, or unloaded if it `leaves`."""
    reason = "unload" if leaves else "load"
    return {"model": model, "created_at": now(), **_said(kind, ReplyPiece(), []), "done": True, "done_reason": reason}


def to_line(value: dict[str, Any]) -> bytes:
    """One line of a stream."""
    return msgspec.json.encode(value) + b"\n"


class LineWriter:
    """One answer while its tokens come in. Times are those that its client waits."""

    def __init__(self, kind: Kind, plan: RequestPlan, codec: TextCodec) -> None:
        self._kind: Kind = kind
        self._plan = plan
        self._choice = Choice(plan, codec)
        self._names = None if plan.logprobs is None else TokenNames(codec, False)
        self._began = self._first = time.perf_counter()
        self._calls: dict[int, CallPart] = {}  # that have begun, by their index
        self._tokens: list[int] = []
        self._finish: Finish | None = None

    def take(self, tokens: list[TokenEvent]) -> list[dict[str, Any]]:
        """The lines of tokens that have come, without the last one."""
        if not self._choice.tokens:
            self._first = time.perf_counter()
        delta = self._choice.take(tokens)
        self._tokens += delta.tokens
        if delta.finish is not None:
            self._finish = delta.finish
        piece = delta.piece or ReplyPiece(content=delta.text)
        calls = [self._shown(part) for part in map(self._grown, piece.calls) if part.complete]
        said = _said(self._kind, piece, calls)
        scores = self._scores(delta)
        if not (piece.content or piece.reasoning or calls or scores):
            return []
        return [{**self._head(), **said, "done": False, **scores}]

    def last(self) -> dict[str, Any]:
        """The line that ends a stream."""
        return {**self._head(), **_said(self._kind, ReplyPiece(), []), **self._ending()}

    def whole(self, events: list[TokenEvent]) -> bytes:
        """JSON of an answer that is not streamed."""
        (line,) = self.take(events) or [{**self._head(), **_said(self._kind, ReplyPiece(), [])}]
        return msgspec.json.encode({**line, **self._ending()})

    def _head(self) -> dict[str, Any]:
        return {"model": self._plan.model, "created_at": now()}

    def _grown(self, part: CallPart) -> CallPart:
        """The call that a part belongs to, as far as it has come."""
        grown = self._calls.get(part.index, CallPart(part.index)).followed_by(part)
        self._calls[part.index] = grown
        return grown

    def _shown(self, call: CallPart) -> dict[str, Any]:
        arguments = msgspec.json.decode(call.arguments or "{}")
        function = {"index": call.index, "name": call.name, "arguments": arguments}
        return {"id": self._plan.call_id(0, call.index), "function": function}

    def _scores(self, delta: Delta) -> dict[str, Any]:
        if self._names is None or not delta.tokens:
            return {}
        return {"logprobs": self._names.chat(delta.tokens, delta.logprobs, delta.top_logprobs)}

    def _ending(self) -> dict[str, Any]:
        finish = self._finish
        assert finish is not None, "asked before the end"
        prompt, ended = self._plan.sequences.prompts[0], time.perf_counter()
        ending: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if finish.reason == "length" else "stop",
            "total_duration": _nanoseconds(ended - self._began),
            "load_duration": 0,
            "prompt_eval_count": len(prompt),
            "prompt_eval_duration": _nanoseconds(self._first - self._began),
            "eval_count": self._choice.tokens,
            "eval_duration": _nanoseconds(ended - self._first),
        }
        if self._kind == "generate":
            ending["context"] = [*prompt, *self._tokens]
        return ending


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)


def _said(kind: Kind, piece: ReplyPiece, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a line that say something."""
    thought = {"thinking": piece.reasoning} if piece.reasoning else {}
    if kind == "generate":
        return {"response": piece.content, **thought}
    called = {"tool_calls": calls} if calls else {}
    return {"message": {"role": "assistant", "content": piece.content, **thought, **called}}
