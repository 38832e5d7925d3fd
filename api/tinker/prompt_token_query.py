"""A sample's questions about other tokens in the places of its prompt's own: those it names, and some drawn.

The SDK names them in an array [prompt tokens - 1, K], dense or CSR, in which -1 asks for nothing; what comes back has
the same layout. Row i is about the prompt's token i + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from api.generation.plan import MAX_WHOLE_LOGPROBS
from api.generation.sequences import Sequences
from api.tinker.bodies import SampleBody, TensorBody
from shared.errors import InvalidRequestError
from shared.frames import TokenLogprobs
from shared.sequences import vocabulary_error

_TARGETS = "target_prompt_logprobs"
_LAST, _DRAWS = "prompt_logprobs_last_n", "prompt_alt_tokens_k"


@dataclass(frozen=True)
class PromptTokenQuery:
    """Other tokens in the places of a prompt's own whose log-probabilities one sample asks for."""

    targets: TensorBody | None = None
    rows: tuple[tuple[int, ...], ...] = ()  # ids of the targets by place, -1 where nothing is asked for
    draws: int = 0

    @classmethod
    def of(cls, body: SampleBody, prompt: int, vocabulary: int) -> "PromptTokenQuery":
        """For a prompt of so many tokens; InvalidRequestError for what does not fit it."""
        last, targets, places = body.prompt_logprobs_last_n, body.target_prompt_logprobs, prompt - 1
        if last is not None and not body.prompt_logprobs:
            raise InvalidRequestError(f"'{_LAST}' goes with 'prompt_logprobs'", param=_LAST)
        if last is not None and last > places:
            raise InvalidRequestError(f"'{_LAST}' is 1 to {places} for a prompt of {prompt} tokens", param=_LAST)
        if body.prompt_alt_tokens_k * places > MAX_WHOLE_LOGPROBS:
            message = f"{places} places with {body.prompt_alt_tokens_k} tokens each are more than {MAX_WHOLE_LOGPROBS}"
            raise InvalidRequestError(message, param=_DRAWS)
        if targets is None:
            return cls(draws=body.prompt_alt_tokens_k)
        rows = _rows(targets, places)
        named = [token for row in rows for token in row if token != -1]
        if len(named) > MAX_WHOLE_LOGPROBS:
            message = f"'{_TARGETS}' names at most {MAX_WHOLE_LOGPROBS} tokens, this one {len(named)}"
            raise InvalidRequestError(message, param=_TARGETS)
        if error := vocabulary_error(named, vocabulary, _TARGETS):
            raise error
        return cls(targets, rows, body.prompt_alt_tokens_k)

    def put_into(self, sequences: Sequences, body: SampleBody) -> Sequences:
        """The sequences with what the query needs of the workers."""
        if not (self._names or self.draws or body.prompt_logprobs_last_n):
            return sequences
        named = tuple(tuple(token for token in row if token != -1) for row in self.rows)
        own, last = sequences.template.sampling.prompt_logprobs, body.prompt_logprobs_last_n or 0
        sampling = msgspec.structs.replace(
            sequences.template.sampling,
            prompt_logprobs=own or 0,
            prompt_logprobs_last=1 if own is None else last,  # they are not read: as few as can be
            prompt_named=named,
            prompt_draws=self.draws,
        )
        return sequences.with_template(sampling=sampling)

    def logprobs(self, reported: Sequence[TokenLogprobs]) -> npt.NDArray[np.float32]:
        """Log-probabilities of the targets in their order, 0 where nothing is asked for; `reported` by prompt token."""
        if not self._names:  # and nothing is reported
            return np.zeros(sum(map(len, self.rows)), np.float32)
        found = (self._of_row(row, each) for row, each in zip(self.rows, reported[1:], strict=True))
        return np.array(list(chain.from_iterable(found)), np.float32)

    def drawn(self, reported: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Tokens that were drawn, by place of the prompt."""
        return [each[len(each) - self.draws :] for each in reported[1:]]

    @property
    def _names(self) -> bool:
        return any(token != -1 for row in self.rows for token in row)

    @staticmethod
    def _of_row(row: Sequence[int], reported: TokenLogprobs) -> list[float]:
        known = iter(reported)
        return [0.0 if token == -1 else next(known).logprob for token in row]


def _rows(targets: TensorBody, places: int) -> tuple[tuple[int, ...], ...]:
    """InvalidRequestError when it is no array [places, K] of int64."""
    shape, crow, columns, data = targets.shape, targets.sparse_crow_indices, targets.sparse_col_indices, targets.data
    if targets.dtype != "int64" or shape is None or len(shape) != 2 or shape[0] != places:
        given = f"{targets.dtype} of shape {shape}"
        raise InvalidRequestError(f"'{_TARGETS}' is an int64 array [{places}, K], not {given}", param=_TARGETS)
    ids = [each for each in data if isinstance(each, int)]
    if len(ids) < len(data):
        raise InvalidRequestError("a token id is a whole number", param=_TARGETS)
    if crow is None and columns is None:
        if len(ids) != places * shape[1]:
            raise InvalidRequestError(f"{len(ids)} numbers are no array {shape}", param=_TARGETS)
        return tuple(tuple(ids[at * shape[1] : (at + 1) * shape[1]]) for at in range(places))
    if crow is None or columns is None or len(columns) != len(ids) or any(each >= shape[1] for each in columns):
        raise InvalidRequestError("its columns are not those of its shape", param=_TARGETS)
    if len(crow) != places + 1 or crow[0] != 0 or crow[-1] != len(ids) or any(b < a for a, b in pairwise(crow)):
        raise InvalidRequestError("its row pointers are not those of its shape", param=_TARGETS)
    return tuple(tuple(ids[start:end]) for start, end in pairwise(crow))
