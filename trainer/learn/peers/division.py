"""Who computes which samples of a train step: parts whose positions are in the proportion of speeds."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from trainer.learn.batches import SampleGroup

T = TypeVar("T")


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
    """How many of its samples a part takes that has so many positions left."""
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
