"""Rows that must follow a grammar: where each one stands in it, and the mask of the tokens that may come next.

`Grammars` compiles, in a few threads apart from the engine's; until then the row waits. The compiler gives the
interpreter's lock back while it works, and the api has seen that it takes seconds at most. `GrammarMasks` is the
sampler's part: the batch looks one step ahead, so the token that a forward is fed becomes known while that forward
runs. In that time the host moves the matchers on by it and computes the masks.

Invariants. When a row's token at position p is drawn, its matcher has taken the p tokens before it. A matcher is used
in the engine's thread only, once it is compiled.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from shared.errors import InvalidGrammarError
from shared.text.codec import TokenizerBundle
from shared.text.grammar import first_line, matcher_of, tokenizer_of

THREADS = 2  # a slow grammar does not keep the next one waiting
KEPT = 64  # compiled grammars; a request with n samples compiles once
_EVERYTHING = np.int32(-1)


class Compiled(NamedTuple):
    """A grammar at its beginning, and the ids that its masks cover: all that the tokenizer or the model knows."""

    matcher: LLMatcher
    vocab_size: int


class Place:
    """Where one row stands in its grammar."""

    def __init__(self, compiled: Future[Compiled], tokens: Sequence[int]) -> None:
        self.compiled = compiled
        self._begin = list(tokens)  # of earlier attempts
        self._matcher: LLMatcher | None = None
        self._ended = False  # an end-of-sequence token came after the grammar's last one
        self.taken = 0
        self.fault = ""  # why the row cannot go on

    @property
    def ready(self) -> bool:
        """True once the grammar is compiled; InvalidGrammarError if it cannot be."""
        if self._matcher is None and self.compiled.done():
            self._matcher = self.compiled.result().matcher.deep_copy()
            self.restart(self._begin)
        if self.fault:
            raise InvalidGrammarError(self.fault)
        return self._matcher is not None

    @property
    def matcher(self) -> LLMatcher:
        assert self._matcher is not None, "an admitted row has a compiled grammar"
        return self._matcher

    @property
    def vocab_size(self) -> int:
        """Number of bits of a mask."""
        return self.compiled.result().vocab_size

    @property
    def is_over(self) -> bool:
        """True if any token is allowed, since the row has ended or failed and its draws are dropped."""
        matcher = self.matcher
        return bool(self.fault) or matcher.stop_reason() == "EndOfSentence" or self._ended

    def restart(self, tokens: Sequence[int]) -> None:
        """Stand after `tokens`, from the beginning."""
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
        try:
            finished = matcher.is_stopped()  # only an end-of-sequence token may follow
            if not matcher.consume_token(token):
                self.fault = first_line(matcher.get_error())
        except Exception as error:
            self.fail(error)
            return
        self._ended = finished

    def copy(self) -> Place:
        """Another one that stands here, and moves on by itself."""
        place = Place(self.compiled, ())
        place._matcher, place.taken = self.matcher.deep_copy(), self.taken
        place._ended, place.fault = self._ended, self.fault
        return place

    def after(self, token: int) -> Place:
        """Where it would stand after one more token; it stays where it is itself."""
        place = self.copy()
        place.take(token)
        return place

    def fail(self, error: Exception) -> None:
        """Record that the matcher failed, which ends this row alone and not its batch."""
        self.fault = f"the grammar failed after {self.taken} tokens: {first_line(str(error))}"

    def note_fault(self) -> None:
        """After a mask: the parser may have hit one of its limits."""
        if not self.fault and self.matcher.is_error():
            self.fault = f"the grammar cannot go on after {self.taken} tokens: {first_line(self.matcher.get_error())}"


class Grammars:
    """Compiles the grammars of one model. With `wake`, in threads, and calls it when one is ready."""

    def __init__(self, bundle: TokenizerBundle, vocab_size: int, wake: Callable[[], None] | None) -> None:
        self._bundle = bundle
        self._vocab_size = vocab_size
        self._wake = wake
        self._threads = _Threads(self._compile) if wake is not None else None
        self._tokenizer: LLTokenizer | None = None
        self._building = threading.Lock()
        self._compiled: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._rows: Counter[Future[Compiled]] = Counter()  # that wait for it or use it

    def open(self, grammar: str, tokens: Sequence[int], owner: str = "") -> Place:
        """A place in a grammar after `tokens`; it is ready later. `owner`: in whose turn."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._start(grammar, owner)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        self._rows[compiled] += 1
        return Place(compiled, tokens)

    def leave(self, place: Place) -> None:
        """Remove a row's place. A compilation that no row waits for any more is not started."""
        compiled = place.compiled
        self._rows[compiled] -= 1
        if self._rows[compiled]:
            return
        del self._rows[compiled]
        if compiled.cancel():
            self._compiled = OrderedDict(each for each in self._compiled.items() if each[1] is not compiled)

    def close(self) -> None:
        """Stop the threads that compile grammars."""
        if self._threads is not None:
            self._threads.close()

    def _start(self, grammar: str, owner: str) -> Future[Compiled]:
        if self._threads is None or self._wake is None:
            done: Future[Compiled] = Future()
            _run(done, self._compile, grammar)
            return done
        wake = self._wake
        compiled = self._threads.submit(grammar, owner)
        compiled.add_done_callback(lambda done: None if done.cancelled() else wake())
        return compiled

    def _compile(self, grammar: str) -> Compiled:
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = tokenizer_of(self._bundle, self._vocab_size)
        return Compiled(matcher_of(grammar, self._tokenizer), self._tokenizer.vocab_size)


class _Threads:
    """A few threads, in which owners take turns."""

    def __init__(self, compile_: Callable[[str], Compiled]) -> None:
        self._compile = compile_
        self._pool = ThreadPoolExecutor(THREADS, "grammars")
        self._lock = threading.Lock()
        self._turns: dict[str, deque[tuple[Future[Compiled], str]]] = {}  # by owner, the next one first

    def submit(self, grammar: str, owner: str) -> Future[Compiled]:
        compiled: Future[Compiled] = Future()
        with self._lock:
            self._turns.setdefault(owner, deque()).append((compiled, grammar))
        self._pool.submit(self._next)
        return compiled

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        with self._lock:
            owner = next(iter(self._turns))
            turns = self._turns.pop(owner)
            compiled, grammar = turns.popleft()
            if turns:
                self._turns[owner] = turns  # after all others
        if compiled.set_running_or_notify_cancel():
            _run(compiled, self._compile, grammar)


def _run(compiled: Future[Compiled], compile_: Callable[[str], Compiled], grammar: str) -> None:
    try:
        compiled.set_result(compile_(grammar))
    except Exception as error:
        compiled.set_exception(error)
