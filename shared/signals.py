"""Signals: what a user or an agent shows of how good a turn was, and the reward that they come to.

Kinds: a **verdict** (`POST /v1/feedback`), the user's **next message** as a judge model labels it, **tests** and an
**exit code** that an agent reports, an **edit** of what was written. Each says how likely it is that the user is
content with the turn, a chance in 0..1.

The judge only labels. What a label is worth is estimated from turns that also have a verdict: its chance is a mean
with a prior of PRIOR_STRENGTH observations (`calibrated`). A judge whose labels have nothing to do with the verdicts
ends with equal chances for all labels, and then nothing is learned from it.

Confidence of a chance p is 1 - H(p), with the binary entropy H in bits: 0 for p = 0.5, 1 for p = 0 or 1. A turn's
reward is the mean of its signals' chances, weighted by confidence; its confidence is 1 - prod(1 - c). A verdict stands
alone. Tests and exit codes concern the whole work, so they count for earlier turns of the branch, too, with the
confidence times DECAY for each turn in between.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from shared.episodes import JoinedTurn

SignalKind = Literal["verdict", "next_message", "tests", "exit_code", "edit"]

LABELS = {  # of a next message -> chance that the user is content, before any verdict
    "accept": 0.9,
    "correction": 0.1,
    "retry": 0.15,
    "other": 0.6,
    "left": 0.5,  # there was none
}
PRIOR_STRENGTH = 4.0  # observations that the chance above counts as
FACT = 0.9  # confidence of what was measured: tests, exit codes, edits
DECAY = 0.8
MOST_TEXT = 4_096  # of a correction or an edit


class Signal(msgspec.Struct, frozen=True, omit_defaults=True):
    """One signal of a turn. There is one of each kind; a later one replaces it."""

    kind: SignalKind
    value: float = 0.0  # chance; of a next message it follows from its labels
    labels: dict[str, float] = {}  # of a next message: probability of each
    text: str = ""  # what the user wrote: the next message, or the edited reply
    detail: str = ""
    judge: str = ""  # model that labelled it; "": a rule


class Calibration(NamedTuple):
    """Chances of the labels, and how many verdicts each was compared with."""

    chances: Mapping[str, float] = LABELS
    verdicts: Mapping[str, float] = {}


class TurnReward(NamedTuple):
    """Reward of a turn in 0..1, with its confidence in 0..1."""

    value: float
    confidence: float


def calibrated(pairs: Iterable[tuple[Mapping[str, float], float]]) -> Calibration:
    """Chances from turns with both: the labels' probabilities, and the verdict's reward, cut to 0..1."""
    weight, content = dict.fromkeys(LABELS, 0.0), dict.fromkeys(LABELS, 0.0)
    for labels, verdict in pairs:
        for label in labels.keys() & LABELS.keys():
            probability = labels[label]
            weight[label] += probability
            content[label] += probability * min(1.0, max(0.0, verdict))
    chances = {
        label: (PRIOR_STRENGTH * prior + content[label]) / (PRIOR_STRENGTH + weight[label])
        for label, prior in LABELS.items()
    }
    return Calibration(chances, {label: round(weight[label], 3) for label in LABELS})


def pairs_of(signals: Mapping[str, Sequence[Signal]]) -> list[tuple[Mapping[str, float], float]]:
    """Labels and verdicts of the turns that have both."""
    found: list[tuple[Mapping[str, float], float]] = []
    for of_turn in signals.values():
        by_kind = {signal.kind: signal for signal in of_turn}
        if "verdict" in by_kind and "next_message" in by_kind:
            found.append((by_kind["next_message"].labels, by_kind["verdict"].value))
    return found


def chance_of(signal: Signal, calibration: Calibration) -> TurnReward:
    """Chance that the user is content by this signal alone, and its confidence."""
    if signal.kind == "verdict":
        return TurnReward(min(1.0, max(0.0, signal.value)), 1.0)
    if signal.kind != "next_message":
        return TurnReward(signal.value, FACT)
    total = sum(signal.labels.values()) or 1.0
    value = sum(p * calibration.chances.get(label, 0.5) for label, p in signal.labels.items()) / total
    return TurnReward(value, certainty(value))


def certainty(chance: float) -> float:
    """1 - H(p) with the binary entropy in bits."""
    if not 0.0 < chance < 1.0:
        return 1.0
    return 1.0 + chance * math.log2(chance) + (1.0 - chance) * math.log2(1.0 - chance)


def rewards_of(
    turns: Sequence[JoinedTurn], signals: Mapping[str, Sequence[Signal]], calibration: Calibration
) -> dict[str, TurnReward]:
    """Rewards of the turns that have any signal, by name."""
    parents = {each.turn.name: each.parent for each in turns}
    weighed: dict[str, list[TurnReward]] = {}
    verdicts: dict[str, float] = {}
    for name in parents:
        for signal in signals.get(name, ()):
            chance = chance_of(signal, calibration)
            if signal.kind == "verdict":
                verdicts[name] = chance.value
                continue
            weighed.setdefault(name, []).append(chance)
            before, confidence = parents[name], chance.confidence
            while before and signal.kind in ("tests", "exit_code"):
                confidence *= DECAY
                weighed.setdefault(before, []).append(TurnReward(chance.value, confidence))
                before = parents.get(before, "")
    rewards = {name: _mean(chances) for name, chances in weighed.items()}
    return rewards | {name: TurnReward(value, 1.0) for name, value in verdicts.items()}


def kept_share(written: str, edited: str) -> float:
    """How much of a reply an edit has left: twice the word pairs that both have over all of theirs (Dice), in 0..1."""
    ours, theirs = _pairs(written), _pairs(edited)
    total = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / total if total else 1.0


def _pairs(text: str) -> Counter[tuple[str, ...]]:
    words = text.split()
    return Counter(itertools.pairwise(words)) if len(words) > 1 else Counter((word,) for word in words)


def _mean(chances: Sequence[TurnReward]) -> TurnReward:
    weight = sum(each.confidence for each in chances)
    value = sum(each.value * each.confidence for each in chances) / weight if weight else 0.5
    return TurnReward(value, 1.0 - math.prod(1.0 - each.confidence for each in chances))
