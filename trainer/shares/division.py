"""Each process's plan of a train step."""

from collections.abc import Sequence
from dataclasses import replace

from trainer.learn.peers.division import divide
from trainer.learn.steps import Plan


def divided(plan: Plan, speeds: Sequence[float]) -> list[Plan]:
    """A plan for each process, in the order of their speeds: their samples are those of the whole, each once."""
    minis = [divide(mini, speeds) for mini in plan.minis]
    return [replace(plan, minis=[parts[i] for parts in minis]) for i in range(len(speeds))]


def positions(plan: Plan, update: int) -> int:
    """How many the forward pass of one update has."""
    return sum(group.tokens for group in plan.minis[plan.order[update]])
