"""The masks of grammars over the vocabulary, for one set of rows of a batch."""

from __future__ import annotations

import logging
from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

from worker.engine.batch.grammars import _EVERYTHING, Place
from worker.engine.batch.row import Row

log = logging.getLogger(__name__)


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
        self._fill(words_CW, open_places)
        for at, place in open_places:
            place.note_fault()
            if place.fault:
                words_CW[at] = _EVERYTHING
        return words_CW

    def _fill(self, words_CW: npt.NDArray[np.int32], open_places: list[tuple[int, Place]]) -> None:
        if len(open_places) > 1 and self._executor is not None:
            try:
                matchers = [(place.matcher, at) for at, place in open_places]
                fill_next_token_bitmask_par(self._executor, matchers, words_CW)
                return
            except Exception as error:  # of one of them; which one shows below
                log.warning("engine.grammar_masks_failed: each is made by itself", exc_info=error)
        for at, place in open_places:
            try:
                fill_next_token_bitmask(place.matcher, words_CW, at)
            except Exception as error:
                place.fail(error)
