"""Log-probabilities in OpenAI's two forms and in vLLM's form of prompt log-probabilities."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from api.generation.choice import RequestPlan
from shared.frames import TokenLogprob, TokenLogprobs
from shared.text.codec import TextCodec

LOWEST = -9999.0  # what OpenAI shows for a probability of nothing; JSON has no infinity


class ChatToken(msgspec.Struct, gc=False):  # there may be a million of them, and none is in a circle
    """A token of a chat choice."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatToken, gc=False):
    """The same with its competitors."""

    top_logprobs: list[ChatToken]


class TextLogprobs(msgspec.Struct):
    """The legacy form of /v1/completions: parallel lists."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[Any] = []  # of each token a dict of name -> log-probability, the drawn one's at least


class TokenNames:
    """How a reply names tokens: by their text, or `token_id:<id>` when the request says so."""

    def __init__(self, codec: TextCodec, by_id: bool) -> None:
        self._codec = codec
        self._by_id = by_id
        self._bytes: dict[int, list[int]] = {}

    def name(self, token: int) -> str:
        """The text of a token, or `token_id:<id>` where the request asks for ids."""
        return f"token_id:{token}" if self._by_id else self._codec.token_text(token)

    def chat(
        self, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[TokenLogprobs] | None
    ) -> list[ChatLogprob]:
        """Entries of `choices[].logprobs.content`, one for each token."""
        return [
            ChatLogprob(
                self.name(token),
                floored(logprob),
                list(self._codec.token_bytes(token)),
                [self._chat_token(top) for top in tops[i]] if tops else [],
            )
            for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
        ]

    def _chat_token(self, top: TokenLogprob) -> ChatToken:
        data = self._bytes.get(top.token)
        if data is None:
            data = self._bytes[top.token] = list(self._codec.token_bytes(top.token))
        return ChatToken(self.name(top.token), floored(top.logprob), data)

    def top(self, tops: TokenLogprobs, token: int, logprob: float) -> dict[str, float]:
        """The token that was drawn, and the most likely ones, which may make one more. Of one name the first counts."""
        named = {self.name(token): floored(logprob)}
        for top in tops:
            named.setdefault(self.name(top.token), floored(top.logprob))
        return named

    def of_prompt(
        self,
        prompt: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[TokenLogprobs] | None,
        count: int,
    ) -> list[dict[str, dict[str, Any]] | None]:
        """vLLM's `prompt_logprobs`: for each prompt token a map of id -> log-probability, rank, text."""
        return [
            None if logprob is None else self._ranked(token, logprob, tops[i][:count] if tops else ())
            for i, (token, logprob) in enumerate(zip(prompt, logprobs, strict=True))
        ]

    def _ranked(self, token: int, logprob: float, tops: TokenLogprobs) -> dict[str, dict[str, Any]]:
        ranked = {
            str(top.token): {"logprob": floored(top.logprob), "rank": rank, "decoded_token": self.name(top.token)}
            for rank, top in enumerate(tops, 1)
        }
        own = {"logprob": floored(logprob), "rank": None, "decoded_token": self.name(token)}
        return {str(token): ranked.get(str(token), own), **ranked}


class TextOffsets:
    """Builds the legacy form piece by piece; an offset is where the token's text begins in the choice's text."""

    def __init__(self, codec: TextCodec, names: TokenNames, top: int, shown: Iterable[str] = ()) -> None:
        self._names = names
        self._top = top
        self._codec = codec
        self._shown = shown
        self._stream = codec.stream(shown)
        self._offset = 0

    @classmethod
    def of(cls, plan: RequestPlan, codec: TextCodec) -> "TextOffsets":
        """Those of a choice of this reply."""
        names = TokenNames(codec, plan.name_tokens_by_id)
        return cls(codec, names, plan.logprobs or 0, plan.shown_tokens(codec))

    def begin(self, text: str) -> None:
        """The completion begins, after this text."""
        self._stream = self._codec.stream(self._shown)
        self._offset = len(text)

    def add(
        self,
        built: TextLogprobs,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[TokenLogprobs] | None,
        seen: int = 0,
    ) -> None:
        """Add the next tokens, but for the first `seen` of them; a prompt's first one has no log-probability."""
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if i >= seen:
                built.text_offset.append(self._offset)
                built.tokens.append(self._names.name(token))
                built.token_logprobs.append(None if logprob is None else floored(logprob))
                top = tops[i][: self._top] if tops else ()
                built.top_logprobs.append(None if logprob is None else self._names.top(top, token, logprob))
            self._offset += len(self._stream.push([token]))


def in_parts(shown: Iterable[Any]) -> list[Any]:
    """A list as JSON, position by position: a long one that is written in one piece holds up all other threads.

    What is made as it is written is also soon gone, where every collection of garbage would look through all of it.
    """
    return [None if each is None else msgspec.Raw(msgspec.json.encode(each)) for each in shown]


def floored(logprob: float) -> float:
    """A finite log-probability, since JSON has no infinity."""
    return max(logprob, LOWEST)
