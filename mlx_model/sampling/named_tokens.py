"""Log-probabilities of the tokens that a row names itself (`logprob_token_ids`), in the most likely ones' place."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from shared.frames import TokenLogprob, TokenLogprobs
from shared.sequences import SamplingParams


class NamedTokens:
    """Tokens whose log-probabilities the rows of a batch ask for. N: tokens named, of all rows."""

    def __init__(self, rows: Sequence[SamplingParams]) -> None:
        self.starts: dict[int, int] = {}  # row of the batch -> where its tokens begin
        self.ids: dict[int, tuple[int, ...]] = {}
        row_ids: list[int] = []
        for index, sampling in enumerate(rows):
            if wanted := sampling.logprob_token_ids:
                self.starts[index], self.ids[index] = len(row_ids), wanted
                row_ids += [index] * len(wanted)
        if row_ids:
            self._rows_N = mx.array(row_ids)
            self._tokens_N = mx.array([token for wanted in self.ids.values() for token in wanted])

    def of(self, logprobs_BV: mx.array) -> mx.array | None:
        """Their log-probabilities [N]; None when no row names any."""
        return logprobs_BV[self._rows_N, self._tokens_N] if self.ids else None


class NamedLogprobs:
    """Log-probabilities of `NamedTokens` in one decode step; copied to the host when first read."""

    __slots__ = ("_logprobs_N", "_tokens", "_values")

    def __init__(self, tokens: NamedTokens, logprobs_N: mx.array | None) -> None:
        self._tokens = tokens
        self._logprobs_N = logprobs_N
        self._values: list[float] = []

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays on the device that are still to be evaluated."""
        return [] if self._logprobs_N is None else [self._logprobs_N]

    def of(self, index: int) -> TokenLogprobs | None:
        """Log-probabilities of row `index` in the order in which it named tokens; None if it named none."""
        ids = self._tokens.ids.get(index)
        if ids is None or self._logprobs_N is None:
            return None
        if not self._values:
            self._values = cast(list[float], self._logprobs_N.tolist())
        start = self._tokens.starts[index]
        return tuple([TokenLogprob(token, self._values[start + at]) for at, token in enumerate(ids)])
