"""Ranks that each have all of the model and learn one policy: each computes its share of every train step.

A policy that learns in one process has `Peers()`, with whom nothing is divided and nothing summed.

Invariants.
- What is called here, all ranks call, in the same order: each method but the shares is a sum over them.
- A step is cut into the same units on all ranks (`each`, `unit`): rank 0 asks for one after the other
  (trainer/learners/ranks.py), and whoever has fewer microbatches does nothing in the last ones.
- A share may be empty. Its gradient is 0.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_model.sites import Whole
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import Work, finished

T = TypeVar("T")


class Peers:
    """This rank among them. Belongs to the thread that computes."""

    def __init__(self, whole: Whole | None = None) -> None:
        """`whole`: how several ranks hold the model; they are peers where each has all of it."""
        self._ranks = whole.ranks if whole is not None and whole.by_data else None

    # -- shares

    def groups(self, groups: list[SampleGroup]) -> list[SampleGroup]:
        """This rank's of the samples of one update."""
        if self._ranks is None:
            return groups
        return divide(groups, [1.0] * self._ranks.size)[self._ranks.rank]

    def share(self, items: Sequence[T], sizes: Sequence[int]) -> Sequence[T]:
        """This rank's of some items."""
        if self._ranks is None:
            return items
        return [items[at] for at in longest_first(sizes, self._ranks.size)[self._ranks.rank]]

    def each(self, parts: Iterable[T]) -> Iterator[T | None]:
        """Parts of a share, and then None until all ranks have had theirs."""
        if self._ranks is None:
            yield from parts
            return
        own = list(parts)
        most = self._ranks.largest(len(own))  # before the first one, so that no rank waits within a unit
        yield from own
        yield from [None] * (most - len(own))

    def unit(self, work: Work[T]) -> Generator[None, None, T]:
        """Run work as one unit; alone it may take several units, and another number of them on each rank."""
        if self._ranks is None:
            return (yield from work)
        value = finished(work)
        yield
        return value

    # -- sums over all ranks

    def gradient(self, part: Any) -> Any:
        """Sum of all ranks' gradients, each of the rank's own share of the batch."""
        if self._ranks is None:
            return part
        vector = _vector(part)
        return _tree(mx.distributed.all_sum(vector, group=self._ranks.group), part)

    def same(self, tree: Any) -> Any:
        """Rank 0's arrays, on all ranks: machines of different kinds round differently."""
        return tree if self._ranks is None else _tree(self._ranks.same(_vector(tree)), tree)

    def numbers(self, own: Sequence[float]) -> list[float]:
        """Each summed, in fp64: a variance is a small difference of two sums."""
        summed: list[float] = self._by_rank(own).sum(0).tolist()
        return summed

    def largest(self, own: float) -> float:
        """Largest of all ranks' numbers."""
        of_all: list[float] = self._by_rank([own])[:, 0].tolist()
        return max(of_all)

    def _by_rank(self, own: Sequence[float]) -> npt.NDArray[np.float64]:
        """All ranks' numbers [R, N], on each of them."""
        if self._ranks is None:
            return np.array([own], np.float64)
        mine = np.array(own, np.float64)
        halves_2N = np.zeros((2, len(mine)), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite stays so
            halves_2N[0] = mine
            halves_2N[1] = np.where(np.isfinite(halves_2N[0]), mine - halves_2N[0], 0.0)
        by_rank_R2N = np.zeros((self._ranks.size, *halves_2N.shape), np.float32)
        by_rank_R2N[self._ranks.rank] = halves_2N  # with zeros in the other places, so that the sum rounds nothing
        told_R2N = np.array(mx.distributed.all_sum(mx.array(by_rank_R2N), group=self._ranks.group), np.float64)
        numbers_RN: npt.NDArray[np.float64] = told_R2N.sum(1)
        return numbers_RN


def _vector(tree: Any) -> mx.array:
    """All numbers of a tree in one array, so that one sum is enough."""
    return mx.concatenate([value.reshape(-1) for _, value in tree_flatten(tree)])


def _tree(vector: mx.array, like: Any) -> Any:
    """Cut a vector into arrays of the tree `like`, evaluated."""
    leaves = tree_flatten(like)
    ends = list(accumulate(value.size for _, value in leaves))
    parts = mx.split(vector, ends[:-1])
    named = {name: part.reshape(value.shape) for (name, value), part in zip(leaves, parts, strict=True)}
    tree = tree_map_with_path(lambda name, _: named[name], like)
    mx.eval(tree)
    return tree


def divide(groups: Sequence[SampleGroup], speeds: Sequence[float]) -> list[list[SampleGroup]]:
    """Parts in the order of the speeds. Groups of similar prompt length stay together, so that little is padding.

    A sample is never cut. A group is, between two parts, where that brings them nearer to what they should have than
    computing its prompt once more takes away.
    """
    parts: list[list[SampleGroup]] = [[] for _ in speeds]
    waiting = deque(sorted(groups, key=lambda group: (len(group.prompt_ids), group.id)))
    total = sum(group.tokens for group in waiting)
    ends = [total * end / sum(speeds) for end in accumulate(speeds)]
    used, at = 0.0, 0
    while waiting:
        group = waiting.popleft()
        if at + 1 == len(parts):
            parts[at].append(group)
            continue
        count = _fitting(group, ends[at] - used)
        if count:
            first = replace(group, samples=group.samples[:count])
            parts[at].append(first)
            used += first.tokens
        if count < len(group.samples):
            at += 1
            waiting.appendleft(replace(group, samples=group.samples[count:]))
    return parts


def _fitting(group: SampleGroup, left: float) -> int:
    """Number of a group's samples that a part takes which has this many positions left."""
    prompt, count = len(group.prompt_ids), len(group.samples)
    ends = accumulate((len(sample.completion_ids) for sample in group.samples), initial=prompt)

    def misses(given: tuple[int, int]) -> float:
        taken, end = given
        if not taken:
            return abs(left)
        return abs(left - end) + (prompt if taken < count else 0)

    return min(reversed([*enumerate(ends)]), key=misses)[0]  # of two as good ones the larger, so that none is idle


def longest_first(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Places of items by part: each goes to the part that has least so far, the largest ones first."""
    places: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        least = sums.index(min(sums))
        places[least].append(at)
        sums[least] += sizes[at]
    return [sorted(each) for each in places]
