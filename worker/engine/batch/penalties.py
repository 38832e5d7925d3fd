"""Edits of the raw logits before the draw: logit bias, tokens that must not come yet, and penalties.

Only rows that ask for an edit pay for it. Tensors are built from what the host knows when the batch changes; after
that counts stay on the device and grow by each step's input token, which the host has not yet seen.

Invariants. The order is bias, then min_tokens' mask, then penalties: repetition (CTRL, arXiv 1909.05858: over prompt
and completion), then frequency and presence (OpenAI: over the completion).
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from worker.engine.batch.row import Row


class LogitEdits:
    """Sparse additions to the logits: bias values, and -inf for stop tokens of rows below min_tokens."""

    def __init__(self, rows: tuple[Row, ...], vocab: int) -> None:
        entries = [
            (index, token, value)
            for index, row in enumerate(rows)
            for token, value in _additions(row)
            if 0 <= token < vocab
        ]
        self.is_empty = not entries
        if entries:
            row_ids, tokens, values = zip(*entries, strict=True)
            self._rows_N, self._tokens_N = mx.array(row_ids), mx.array(tokens)
            self._values_N = mx.array(values, mx.float32)
        waits = [row.sampling.min_tokens - row.position for row in rows]
        self.steps_valid = min((wait for wait in waits if wait > 0), default=0)  # 0: until the batch changes

    def apply(self, logits_BV: mx.array) -> mx.array:
        """The edited logits [B, V]."""
        return logits_BV.at[self._rows_N, self._tokens_N].add(self._values_N)


def _additions(row: Row) -> Iterable[tuple[int, float]]:
    yield from row.sampling.logit_bias.items()
    if row.position < row.sampling.min_tokens:
        yield from ((token, -float("inf")) for token in row.stop_ids)


class Penalties:
    """Presence, frequency and repetition penalties of the rows that have any."""

    def __init__(self, rows: tuple[Row, ...], vocab: int) -> None:
        indices = [index for index, row in enumerate(rows) if _has_penalty(row)]
        self.is_empty = not indices
        if not indices:
            return
        chosen = [rows[index] for index in indices]
        self._vocab = vocab
        self._all_rows = len(indices) == len(rows)
        self._rows_P = mx.array(indices)
        self._own_P = mx.arange(len(indices))
        self._counts_PV = mx.array(np.stack([_counts(row.tokens, vocab) for row in chosen]))
        # An input that has been reported, or that ends the row's context, is counted already.
        self._in_flight_P = mx.array([float(row.position > len(row.tokens)) for row in chosen])
        column = [np.array(values, np.float32)[:, None] for values in zip(*map(_strengths, chosen), strict=True)]
        self._presence_P1, self._frequency_P1, self._repetition_P1 = map(mx.array, column)
        self._repeats = bool((column[2] != 1).any())
        if self._repeats:
            seen = [_counts(row.spec.prompt_ids, vocab) > 0 for row in chosen]
            self._in_prompt_PV = mx.array(np.stack(seen))

    def apply(self, logits_BV: mx.array, inputs_B: mx.array) -> mx.array:
        """Penalised logits [B, V]; `inputs_B` are the ids fed into this step's forward."""
        inputs_P = inputs_B if self._all_rows else inputs_B[self._rows_P]
        self._counts_PV = self._counts_PV.at[self._own_P, inputs_P].add(self._in_flight_P)
        self._in_flight_P = mx.ones_like(self._in_flight_P)
        counts_PV = self._counts_PV
        logits_PV = logits_BV if self._all_rows else logits_BV[self._rows_P]
        if self._repeats:
            strength_PV = mx.where(self._in_prompt_PV | (counts_PV > 0), self._repetition_P1, 1.0)
            logits_PV = mx.where(logits_PV > 0, logits_PV / strength_PV, logits_PV * strength_PV)
        logits_PV = logits_PV - self._frequency_P1 * counts_PV - self._presence_P1 * (counts_PV > 0)
        if self._all_rows:
            return logits_PV
        edited_BV = mx.array(logits_BV)
        edited_BV[self._rows_P] = logits_PV
        return edited_BV


def _has_penalty(row: Row) -> bool:
    return _strengths(row) != (0.0, 0.0, 1.0)


def _strengths(row: Row) -> tuple[float, float, float]:
    s = row.sampling
    return s.presence_penalty, s.frequency_penalty, s.repetition_penalty


def _counts(tokens: Iterable[int], vocab: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """How often each id occurs, [V] fp32."""
    return np.bincount(np.fromiter(tokens, np.int64), minlength=vocab)[:vocab].astype(np.float32)
