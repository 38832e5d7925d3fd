"""Server-sent events of a stream. What is the same in every chunk of a request is encoded once.

Writing a chunk costs a few microseconds: the text is encoded by msgspec, the rest are bytes that lie ready.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from api.generation.choice import (
    Choice,
    ChoiceProgress,
    Delta,
    PromptDetails,
    RequestPlan,
    Usage,
    shown_versions,
    usage,
)
from api.generation.logprobs import TextLogprobs, TextOffsets, TokenNames
from shared.text.codec import TextCodec
from shared.text.languages.pieces import CallPart, ReplyPiece

_json = msgspec.json.Encoder()
_FINISH = {None: b"null"} | {
    each: b'"%s"' % each.encode() for each in ("stop", "length", "tool_calls", "function_call", "abort")
}


class ChunkWriter:
    """Writes the events of one stream."""

    def __init__(self, plan: RequestPlan, codec: TextCodec) -> None:
        kind = "chat.completion.chunk" if plan.sequences.chat else "text_completion"
        start = {"id": plan.shown_id, "object": kind, "created": plan.created, "model": plan.model}
        self._head = b"data: " + _json.encode({**start, "system_fingerprint": plan.fingerprint})[:-1]
        self._tail = b',"usage":null}\n\n' if plan.include_usage else b"}\n\n"
        opened = b'"delta":' if plan.sequences.chat else b'"text":'
        self._choice_heads = [
            b'%s,"choices":[{"index":%d,%s' % (self._head, index, opened) for index in range(len(plan.sequences))
        ]
        self._plan = plan
        self._chat = plan.sequences.chat
        self._plain = plan.logprobs is None and not plan.token_ids and not plan.weight_versions
        if plan.logprobs is not None:
            self._names = TokenNames(codec, plan.name_tokens_by_id)
            self._offsets = [] if self._chat else [TextOffsets.of(plan, codec) for _ in range(len(plan.sequences))]

    def role(self, index: int) -> bytes:
        """The chunk that opens a chat choice."""
        body = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        if self._plan.token_ids and index == 0:
            body += b',"prompt_token_ids":' + _json.encode(self._plan.sequences.prompts[0])
        return self._choice_heads[index] + body + self._tail

    def chunk(self, index: int, delta: Delta) -> bytes:
        """The chunk for a delta; empty when there is nothing to say."""
        if delta.piece is not None:
            return self._split_chunk(index, delta, delta.piece)
        text, finish = delta.text, delta.finish
        if self._plan.echo and delta.first:
            text = self._plan.echo[index // self._plan.sequences.n] + text
        if self._plain:
            if finish is None:
                return self._plain_chunk(index, text) if text else b""
            rest = self._rest(index, delta)
        else:
            rest = self._rest(index, delta)
            if not text and finish is None and delta.seen_tokens == len(delta.tokens):
                return b""
        encoded = _json.encode(text)
        if self._chat:
            encoded = b'{"content":%s}' % encoded if text or finish is None else b"{}"
        return b"%s%s%s%s" % (self._choice_heads[index], encoded, rest, self._tail)

    def _split_chunk(self, index: int, delta: Delta, piece: ReplyPiece) -> bytes:
        shown = shown_piece(self._plan, index, piece)
        news = not self._plain and delta.seen_tokens < len(delta.tokens)
        if not shown and delta.finish is None and not news:
            return b""
        return b"%s%s%s%s" % (self._choice_heads[index], _json.encode(shown), self._rest(index, delta), self._tail)

    def _plain_chunk(self, index: int, text: str) -> bytes:
        shape = (
            b'%s{"content":%s},"logprobs":null,"finish_reason":null}]%s'
            if self._chat
            else b'%s%s,"logprobs":null,"finish_reason":null}]%s'
        )
        return shape % (self._choice_heads[index], _json.encode(text), self._tail)

    def _rest(self, index: int, delta: Delta) -> bytes:
        finish = delta.finish
        rest = b',"logprobs":%s,"finish_reason":%s' % (self._logprobs(index, delta), _FINISH[delta.finish_reason])
        if finish is not None and finish.stop_match is not None:
            rest += b',"stop_reason":' + _json.encode(finish.stop_match)
        if self._plan.token_ids:
            rest += b',"token_ids":' + _json.encode(delta.tokens[delta.seen_tokens :])
            if delta.first and not self._chat:
                rest += b',"prompt_token_ids":' + _json.encode(self._plan.sequences.prompt_of(index))
        if self._plan.weight_versions:
            rest += b',"weight_versions":' + _json.encode(shown_versions(delta.versions))
        return rest + b"}]"

    def _logprobs(self, index: int, delta: Delta) -> bytes:
        if self._plan.logprobs is None:
            return b"null"
        seen = delta.seen_tokens
        if not self._chat:
            shown = text_logprobs(self._plan, self._offsets[index], index, delta)
            return _json.encode(shown)
        tops = delta.top_logprobs[seen:] if delta.top_logprobs is not None else None
        content = self._names.chat(delta.tokens[seen:], delta.logprobs[seen:], tops)
        return b'{"content":%s,"refusal":null}' % _json.encode(content)

    def counted(self, chunk: bytes, index: int, choice: Choice) -> bytes:
        """A chunk with the counts of its choice so far in the place of no usage."""
        prompt = len(self._plan.sequences.prompt_of(index))
        counts = Usage(prompt, choice.tokens, prompt + choice.tokens, PromptDetails(choice.cached))
        return b'%s,"usage":%s}\n\n' % (chunk[: -len(self._tail)], _json.encode(counts))

    def usage(self, choices: Sequence[Choice]) -> bytes:
        """The last chunk before [DONE], when the request wants the counts."""
        counts = _json.encode(usage(self._plan, choices))
        return b'%s,"choices":[],"usage":%s}\n\n' % (self._head, counts)


def text_logprobs(plan: RequestPlan, offsets: TextOffsets, index: int, delta: Delta) -> TextLogprobs:
    """The legacy form of what is new, after the echoed prompt's when the choice begins with one."""
    prompt, built = index // plan.sequences.n, TextLogprobs()
    if plan.echo and delta.prompt_logprobs is not None:
        ids = plan.sequences.prompts[prompt]
        offsets.add(built, ids, delta.prompt_logprobs, delta.prompt_top_logprobs, 0 if delta.first else len(ids))
        offsets.begin(plan.echo[prompt])
    offsets.add(built, delta.tokens, delta.logprobs, delta.top_logprobs, delta.seen_tokens)
    return built


def shown_piece(plan: RequestPlan, index: int, piece: ReplyPiece) -> dict[str, Any]:
    """The fields of a chat delta; only what is new."""
    shown: dict[str, Any] = {}
    if piece.reasoning:
        shown["reasoning_content"] = piece.reasoning
    if piece.content:
        shown["content"] = piece.content
    if piece.calls and plan.split is not None and plan.split.older:
        shown["function_call"] = older_call(piece.calls[0])
    elif piece.calls:
        shown["tool_calls"] = [
            {"index": part.index, **shown_call(plan.call_id(index, part.index), part)} for part in piece.calls
        ]
    return shown


def shown_call(call_id: str, part: CallPart) -> dict[str, Any]:
    """A tool call as OpenAI shows it; more of one that has begun is arguments alone."""
    if part.custom:
        named = {"id": call_id, "type": "custom"} if part.name else {}
        return {**named, "custom": {**({"name": part.name} if part.name else {}), "input": part.arguments}}
    if not part.name:
        return {"function": {"arguments": part.arguments}}
    return {"id": call_id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}


def older_call(part: CallPart) -> dict[str, str]:
    """A call in OpenAI's older form, or more of one."""
    return {**({"name": part.name} if part.name else {}), "arguments": part.arguments}


def event_id(choices: Sequence[Choice]) -> bytes:
    """The `id:` line when so much has been shown: `index:tokens:chars[:end]` of each choice begun, comma-separated."""
    parts = [
        f"{index}:{choice.tokens}:{choice.chars}{':end' if choice.ended else ''}"
        for index, choice in enumerate(choices)
        if choice.begun
    ]
    return f"id: {','.join(parts)}\n".encode()


def seen_until(event: str, choices: int) -> list[ChoiceProgress]:
    """Read an event id; ValueError when it is none of ours."""
    seen = [ChoiceProgress() for _ in range(choices)]
    for part in filter(None, event.split(",")):
        index, tokens, chars, *ended = part.split(":")
        if not 0 <= int(index) < choices or ended not in ([], ["end"]) or min(int(tokens), int(chars)) < 0:
            raise ValueError(event)
        seen[int(index)] = ChoiceProgress(int(tokens), int(chars), bool(ended), begun=True)
    return seen
