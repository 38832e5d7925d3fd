"""Tokens that a row may not draw: all but `allowed_token_ids`, and the last token of each of its `bad_words`.

Only rows that ask for it pay. A bad word of several tokens forbids its last one wherever the completion ends with those
before it. The latest tokens are kept on the device and grow by each step's input, so nothing waits for the host.

Invariants. A row's history covers its completion alone. The host's part is built when the batch changes; an input that
it knew by then is not taken twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from worker.engine.batch.row import Row

_ANY = -1  # stands for any token before a shorter word
_NONE = -2  # before a completion's first token


class TokenMasks:
    """Masks of a batch. A: rows with allowed ids. H: rows with bad words. N: bad words. M: their lengths - 1."""

    def __init__(self, rows: tuple[Row, ...], vocab: int) -> None:
        allowing = [index for index, row in enumerate(rows) if row.sampling.allowed_token_ids]
        barring = [index for index, row in enumerate(rows) if row.sampling.bad_words]
        self._allows, self._bars = bool(allowing), bool(barring)
        self.is_empty = not (allowing or barring)
        if allowing:
            allowed_AV = np.zeros((len(allowing), vocab), np.bool_)
            for at, index in enumerate(allowing):
                allowed_AV[at, [id_ for id_ in rows[index].sampling.allowed_token_ids if id_ < vocab]] = True
            self._all_rows = len(allowing) == len(rows)
            self._rows_A, self._allowed_AV = mx.array(allowing), mx.array(allowed_AV)
        if barring:
            self._prepare_words([rows[index] for index in barring], barring, vocab)

    def _prepare_words(self, rows: Sequence[Row], indices: list[int], vocab: int) -> None:
        words = [(at, word) for at, row in enumerate(rows) for word in row.sampling.bad_words if word[-1] < vocab]
        length = max((len(word) - 1 for _, word in words), default=0)
        self._bars = bool(words)
        self._rows_H = mx.array(indices)
        self._history_of_N = mx.array([at for at, _ in words])
        self._rows_N, self._last_N = mx.array([indices[at] for at, _ in words]), mx.array([w[-1] for _, w in words])
        self._length = length
        if not length:
            return
        self._starts_NM = mx.array([[_ANY] * (length + 1 - len(word)) + list(word[:-1]) for _, word in words])
        known = [[_NONE] * length + row.tokens[-length:] for row in rows]
        self._history_HM = mx.array([tokens[-length:] for tokens in known])
        self._in_flight_H1 = mx.array([[row.position > len(row.tokens)] for row in rows])

    def apply(self, logits_BV: mx.array, inputs_B: mx.array) -> mx.array:
        """Logits [B, V], -inf where a token is forbidden; `inputs_B` are the ids that were fed."""
        if self._allows:
            logits_BV = self._only_allowed(logits_BV)
        if not self._bars:
            return logits_BV
        if not self._length:
            return logits_BV.at[self._rows_N, self._last_N].add(-mx.inf)
        inputs_H1 = inputs_B[self._rows_H][:, None].astype(self._history_HM.dtype)
        moved_HM = mx.concatenate([self._history_HM[:, 1:], inputs_H1], axis=1)
        self._history_HM = mx.where(self._in_flight_H1, moved_HM, self._history_HM)
        self._in_flight_H1 = mx.ones_like(self._in_flight_H1)
        same_NM = (self._starts_NM == _ANY) | (self._starts_NM == self._history_HM[self._history_of_N])
        return logits_BV.at[self._rows_N, self._last_N].add(mx.where(mx.all(same_NM, axis=1), -mx.inf, 0.0))

    def _only_allowed(self, logits_BV: mx.array) -> mx.array:
        if self._all_rows:
            return mx.where(self._allowed_AV, logits_BV, -mx.inf)
        masked_BV = mx.array(logits_BV)
        masked_BV[self._rows_A] = mx.where(self._allowed_AV, logits_BV[self._rows_A], -mx.inf)
        return masked_BV
