"""Who computes which samples of a train step: parts whose positions are in the proportion of the processes' speeds."""

from collections.abc import Sequence
from dataclasses import replace

from trainer.learn.batches import SampleGroup
from trainer.learn.steps import Plan

WHOLE = 4  # groups a part from which on no group is divided: its prompt would be computed twice


def divided(plan: Plan, speeds: Sequence[float]) -> list[Plan]:
    """A plan for each process, in the order of their speeds: their samples are those of the whole, each once."""
    minis = [divide(mini, speeds) for mini in plan.minis]
    return [replace(plan, minis=[parts[i] for parts in minis]) for i in range(len(speeds))]


def divide(groups: Sequence[SampleGroup], speeds: Sequence[float]) -> list[list[SampleGroup]]:
    """Groups of similar prompt length stay together, so that little is padding; a sample is never cut."""
    whole = len(groups) >= WHOLE * len(speeds)
    pieces = [
        piece
        for group in sorted(groups, key=lambda group: (len(group.prompt_ids), group.id))
        for piece in ([group] if whole else [replace(group, samples=(sample,)) for sample in group.samples])
    ]
    parts: list[list[SampleGroup]] = [[] for _ in speeds]
    total, used, at = sum(piece.tokens for piece in pieces), 0.0, 0
    ends = [total * sum(speeds[: i + 1]) / sum(speeds) for i in range(len(speeds))]
    for piece in pieces:
        while at + 1 < len(ends) and used + piece.tokens / 2 > ends[at]:
            at += 1
        used += piece.tokens
        part = parts[at]
        if part and not whole and part[-1].id == piece.id and part[-1].prompt_ids == piece.prompt_ids:
            part[-1] = replace(part[-1], samples=part[-1].samples + piece.samples)
        else:
            part.append(piece)
    return parts


def positions(plan: Plan, update: int) -> int:
    """How many the forward pass of one update has."""
    return sum(group.tokens for group in plan.minis[plan.order[update]])
