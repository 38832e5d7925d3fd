"""The computation of distilling: how far the student is from its teacher's scores. Belongs to the MLX thread."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from trainer.learn.batches import Sample, SampleGroup
from trainer.learn.compute import Work
from trainer.learn.divergence import UNKNOWN, divergences
from trainer.learn.logprobs import BatchArrays, halves_of
from trainer.learners.data import Measured
from trainer.learners.tuning import RowLearner


class ScoredRow(msgspec.Struct, frozen=True):
    """A line of the file: a row, and of each token that counts the teacher's likeliest ones in its place."""

    teacher: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    counts: tuple[bool, ...]
    top_ids: tuple[tuple[int, ...], ...]  # one for each token that counts
    top_logprobs: tuple[tuple[float, ...], ...]
    held_out: bool = False  # of a data set of its own
    top_k: int = 0  # tokens that were asked for; 0: not known

    @classmethod
    def as_said(cls, teacher: str, prompt_ids: Sequence[int], reply_ids: Sequence[int], top_k: int) -> "ScoredRow":
        """A row whose every token is the only one that its teacher would write."""
        count, own = len(reply_ids), tuple((id_,) for id_ in reply_ids)
        return cls(teacher, tuple(prompt_ids), tuple(reply_ids), (True,) * count, own, ((0.0,),) * count, top_k=top_k)

    def within(self, vocab_size: int) -> "ScoredRow":
        """Drop tokens beyond the student's vocabulary: models may have more rows than tokens."""
        kept = [
            [(id_, logprob) for id_, logprob in zip(*place, strict=True) if id_ < vocab_size]
            for place in zip(self.top_ids, self.top_logprobs, strict=True)
        ]
        return msgspec.structs.replace(
            self,
            top_ids=tuple(tuple(id_ for id_, _ in place) for place in kept),
            top_logprobs=tuple(tuple(logprob for _, logprob in place) for place in kept),
        )

    def group(self, name: str) -> SampleGroup:
        """The row as tuning has it."""
        zeros = (0,) * len(self.completion_ids)
        sample = Sample(self.completion_ids, tuple(map(float, zeros)), self.counts, zeros, 0.0)
        return SampleGroup(name, self.prompt_ids, (sample,))


class DistillLearner(RowLearner[ScoredRow]):
    """A LoRA that learns from a teacher's scores."""

    def group(self, item: ScoredRow) -> SampleGroup:
        return item.group("")

    def measure(self, items: Sequence[ScoredRow]) -> Work[Measured]:
        """The share of tokens that student and teacher take for the likeliest alike, and the divergence a token."""
        alike, distance, tokens = 0, 0.0, self._tokens(items)
        for part in self._parts(items):
            x, (ids_NK, teacher_NK) = self._arrays(part), self._scores_of(part)
            body, head = halves_of(self.policy.model, self._chunk)
            hidden_NH = _counting(body, x)
            step = self._chunk or len(ids_NK)
            for at in range(0, len(ids_NK), step):
                logits_NV = head(hidden_NH[None, at : at + step])[0]
                alike += int(np.array(mx.argmax(logits_NV, axis=-1) == ids_NK[at : at + step, 0]).sum())
            distance += np.array(divergences(head, hidden_NH, ids_NK, teacher_NK, self._chunk)).sum().item()
            yield
        return Measured(alike / tokens, distance / tokens)

    def gradient(self, part: Sequence[ScoredRow], items: Sequence[ScoredRow]) -> tuple[Any, dict[str, Any]]:
        scores, whole = self._scores_of(part), self._tokens(items)
        value, gradients = self.policy.value_and_grad(self._distance, whole, self._arrays(part), *scores, whole)
        return value, {"body": gradients}

    def _distance(self, model: Any, x: BatchArrays, ids_NK: mx.array, teacher_NK: mx.array, whole: int) -> mx.array:
        body, head = halves_of(model, self._chunk)
        return divergences(head, _counting(body, x), ids_NK, teacher_NK, self._chunk).sum() / whole

    def _scores_of(self, part: Sequence[ScoredRow]) -> tuple[mx.array, mx.array]:
        """The teacher's tokens and their log-probabilities [N, K] at the positions that count, row by row."""
        ids = [top for row in part for top in row.top_ids]
        logprobs = [top for row in part for top in row.top_logprobs]
        shape = len(ids), max(map(len, ids))
        ids_NK, teacher_NK = np.zeros(shape, np.int32), np.full(shape, UNKNOWN, np.float32)
        for at, (top, logps) in enumerate(zip(ids, logprobs, strict=True)):
            ids_NK[at, : len(top)], teacher_NK[at, : len(top)] = top, logps
        return mx.array(ids_NK), mx.array(teacher_NK)


def _counting(body: Any, x: BatchArrays) -> mx.array:
    """Hidden states [N, H] before the tokens that count, row by row."""
    rows, places = np.nonzero(np.array(x.mask_BT))
    before = np.array(x.start_B)[rows] - 1 + places
    hidden_NH: mx.array = body(x.rows_BL[:, :-1])[mx.array(rows), mx.array(before)]
    return hidden_NH
