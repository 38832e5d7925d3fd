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
from typing import TYPE_CHECKING, NamedTuple, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

from shared.errors import InvalidGrammarError
from shared.grammar import first_line, matcher_of, tokenizer_of
from shared.text import TokenizerBundle

if TYPE_CHECKING:
    from worker.engine.rows import Row

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


class GrammarMasks:
    """The masks of one set of rows. C: rows with a grammar. W: 32-bit words of a mask over the vocabulary."""

    def __init__(self, rows: tuple[Row, ...], vocab: int) -> None:
        places = [(index, row.place) for index, row in enumerate(rows)]
        self._places = [(index, place) for index, place in places if place is not None]
        self.is_empty = not self._places
        if self.is_empty:
            return
        self._rows = rows
        self._vocab = vocab
        self._all_rows = len(self._places) == len(rows)
        self._indices_C = mx.array([index for index, _ in self._places])
        self._executor = LLExecutor() if len(self._places) > 1 else None

    def apply(self, logits_BV: mx.array, inputs_B1: mx.array) -> mx.array:
        """Logits [B, V], -inf where a row's grammar forbids the token; `inputs_B1` are the ids that were fed."""
        inputs_B = inputs_B1[:, 0]
        # Apart, so that reading the inputs does not wait for the forward that they are fed to.
        mx.async_eval(inputs_B)  # type: ignore[no-untyped-call]
        mx.async_eval(logits_BV)  # type: ignore[no-untyped-call]
        allowed_CV = mx.array(self._allowed(cast(list[int], inputs_B.tolist())))
        if self._all_rows:
            return mx.where(allowed_CV, logits_BV, -mx.inf)
        masked_BV = mx.array(logits_BV)
        masked_BV[self._indices_C] = mx.where(allowed_CV, logits_BV[self._indices_C], -mx.inf)
        return masked_BV

    def _allowed(self, inputs: list[int]) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [C, V]: in the host's time, which the forward's covers."""
        words_CW = self._next_words(inputs)
        bits_CV = np.unpackbits(words_CW.view(np.uint8), axis=1, count=self._vocab, bitorder="little")
        return bits_CV.view(np.bool_)

    def _next_words(self, inputs: list[int]) -> npt.NDArray[np.int32]:
        words_CW = allocate_token_bitmask(len(self._places), self._places[0][1].vocab_size)
        open_places: list[tuple[int, Place]] = []
        for at, (index, place) in enumerate(self._places):
            if place.taken < self._rows[index].position:
                place.take(inputs[index])
            if not place.is_over:
                open_places.append((at, place))
        if len(open_places) == 1 or self._executor is None:
            for at, place in open_places:
                fill_next_token_bitmask(place.matcher, words_CW, at)
        elif open_places:
            fill_next_token_bitmask_par(self._executor, [(place.matcher, at) for at, place in open_places], words_CW)
        for at, place in open_places:
            place.note_fault()
            if place.fault:
                words_CW[at] = _EVERYTHING
        return words_CW
