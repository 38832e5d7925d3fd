"""Rows that must follow a grammar: where each one stands in it, and the mask of the tokens that may come next.

`Grammars` compiles, in a thread beside the engine's; until then the row waits. `GrammarMasks` is the sampler's part:
the batch looks one step ahead, so the token that a forward is fed becomes known while that forward runs. In that
time the host moves the matchers on by it and computes the masks.

Invariants. When a row's token at position p is drawn, its matcher has taken the p tokens before it. A matcher is used
in the engine's thread only, once it is compiled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from shared.errors import InvalidGrammarError
from shared.text.codec import TokenizerBundle
from shared.text.grammar import first_line, matcher_of, tokenizer_of

KEPT = 64  # compiled grammars; a request with n samples compiles once
_EVERYTHING = np.int32(-1)


class Compiled(NamedTuple):
    """A grammar at its beginning, and the ids that its masks cover: all that the tokenizer or the model knows."""

    matcher: LLMatcher
    vocab_size: int


class Place:
    """Where one row stands in its grammar."""

    def __init__(self, compiled: Future[Compiled], tokens: Sequence[int]) -> None:
        self._compiled = compiled
        self._begin = list(tokens)  # of earlier attempts
        self._matcher: LLMatcher | None = None
        self._ended = False  # an end-of-sequence token came after the grammar's last one
        self.taken = 0
        self.fault = ""  # why the row cannot go on

    @property
    def ready(self) -> bool:
        """Whether the grammar is compiled; InvalidGrammarError when it cannot be."""
        if self._matcher is None and self._compiled.done():
            self._matcher = self._compiled.result().matcher.deep_copy()
            self.restart(self._begin)
        if self.fault:
            raise InvalidGrammarError(self.fault)
        return self._matcher is not None

    @property
    def matcher(self) -> LLMatcher:
        """The row's own."""
        assert self._matcher is not None, "an admitted row has a compiled grammar"
        return self._matcher

    @property
    def vocab_size(self) -> int:
        """Bits of a mask."""
        return self._compiled.result().vocab_size

    @property
    def is_over(self) -> bool:
        """Whether any token will do: the row has ended or failed, and what is drawn for it is thrown away."""
        matcher = self.matcher
        return bool(self.fault) or matcher.stop_reason() == "EndOfSentence" or self._ended

    def restart(self, tokens: Sequence[int]) -> None:
        """Stand behind `tokens`, from the beginning."""
        self._ended = False
        if self._matcher is None:
            self._begin = list(tokens)
            return
        self._matcher.reset()
        self.taken = 0
        for token in tokens:
            self.take(token)

    def take(self, token: int) -> None:
        """Move on by one token."""
        matcher = self.matcher
        self.taken += 1
        if self.is_over:
            return
        finished = matcher.is_stopped()  # only an end-of-sequence token may follow
        if not matcher.consume_token(token):
            self.fault = first_line(matcher.get_error())
        self._ended = finished

    def note_fault(self) -> None:
        """After a mask: the parser may have hit one of its limits."""
        if self.matcher.is_error():
            self.fault = f"the grammar cannot go on after {self.taken} tokens: {first_line(self.matcher.get_error())}"


class Grammars:
    """Compiles the grammars of one model. With `wake`, in a thread, and calls it when one is ready."""

    def __init__(self, bundle: TokenizerBundle, vocab_size: int, wake: Callable[[], None] | None) -> None:
        self._bundle = bundle
        self._vocab_size = vocab_size
        self._wake = wake
        self._pool = ThreadPoolExecutor(1, "grammars") if wake is not None else None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[Compiled]] = OrderedDict()

    def open(self, grammar: str, tokens: Sequence[int]) -> Place:
        """A place in a grammar behind `tokens`; it is ready later."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._start(grammar)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Place(compiled, tokens)

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, grammar: str) -> Future[Compiled]:
        if self._pool is None or self._wake is None:
            done: Future[Compiled] = Future()
            try:
                done.set_result(self._compile(grammar))
            except InvalidGrammarError as error:
                done.set_exception(error)
            return done
        wake = self._wake
        compiled = self._pool.submit(partial(self._compile, grammar))
        compiled.add_done_callback(lambda _: wake())
        return compiled

    def _compile(self, grammar: str) -> Compiled:
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self._bundle, self._vocab_size)
        return Compiled(matcher_of(grammar, self._tokenizer), self._tokenizer.vocab_size)
