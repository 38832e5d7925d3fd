"""The rewards that are computed from a text alone: a function of its own for each, and how it is found.

Two of them are long and stand in files of their own, `gsm8k.py` and `math.py`; math-verify takes a second to import, so
that a pool process loads it only when a job asks for it.
"""

import re
from collections.abc import Callable
from typing import Any

from shared.jobs import RewardSpec
from shared.rewards import gsm8k
from shared.rewards.kinds import ExactOptions, FormatOptions, LengthOptions, RegexOptions, Score, WeightedOptions, check

Scorer = Callable[[str, Any, Any], Score]  # completion, reference, the reward's options


def load(name: str) -> Scorer:
    """The function of a reward; importing math-verify takes a second, so this is apart from calling it."""
    if name == "math":
        from shared.rewards import math

        return math.score
    if name not in SCORERS:
        raise ValueError(f"no function computes a reward {name!r}")
    return SCORERS[name]


def exact(completion: str, reference: Any, options: ExactOptions) -> Score:
    """1 when the completion equals the reference, or one of the references in a list."""
    accepted = reference if isinstance(reference, list) else [reference]
    if not accepted or any(item is None or isinstance(item, dict | list) for item in accepted):
        raise ValueError("exact needs a reference: a text, a number, or a list of them")
    given = _plain(completion, options)
    return Score(float(any(given == _plain(str(item), options) for item in accepted)))


def _plain(text: str, options: ExactOptions) -> str:
    text = text.strip() if options.strip else text
    return text.casefold() if options.ignore_case else text


def regex(completion: str, reference: Any, options: RegexOptions) -> Score:
    """1 when the pattern matches, and its group, if one is named, equals the reference."""
    pattern = options.pattern or reference
    if not isinstance(pattern, str) or not pattern:
        raise ValueError("regex needs a pattern in its options or as the reference")
    try:
        compiled = re.compile(pattern, options.flags)
    except re.error as error:
        raise ValueError(f"the reference is no pattern: {error}") from error
    match = compiled.fullmatch(completion) if options.full else compiled.search(completion)
    if match is None:
        return Score(0.0, {"matched": 0.0})
    if options.group is None:
        return Score(1.0, {"matched": 1.0})
    if reference is None:
        raise ValueError("regex with a group needs a reference to compare it with")
    captured = match[options.group]
    right = captured is not None and captured.strip() == str(reference).strip()
    return Score(float(right), {"matched": 1.0})


def form(completion: str, reference: Any, options: FormatOptions) -> Score:
    """The share of tags (and of the pattern) that is right; components name each."""
    components: dict[str, float] = {}
    after = 0
    for tag in options.tags:
        end = _tag_end(completion, tag, after)
        components[tag] = float(end is not None)
        after = after if end is None else end
    if options.pattern:
        components["pattern"] = float(re.search(options.pattern, completion, re.DOTALL) is not None)
    value = sum(components.values()) / len(components)
    return Score(0.0 if options.all_or_nothing and value < 1 else value, components)


def _tag_end(text: str, tag: str, after: int) -> int | None:
    """End of the tag's one pair, when it stands after `after`."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.index(opening), text.index(closing)
    return end + len(closing) if after <= start < end else None


def length(completion: str, reference: Any, options: LengthOptions) -> Score:
    """1 within the target, falling linearly beyond it."""
    size = len(completion.split()) if options.unit == "words" else len(completion)
    beyond = abs(size - options.target) if options.shape == "near" else max(0, size - options.target)
    slack = options.slack or options.target
    return Score(max(options.floor, 1.0 - beyond / slack), {"length": float(size)})


def weighted(completion: str, reference: Any, options: WeightedOptions) -> Score:
    """Each part's value times its weight; a part that raises fails the whole, under its name."""
    total = 0.0
    components: dict[str, float] = {}
    for part in options.parts:
        try:
            value = load(part.name)(completion, reference, check(RewardSpec(part.name, part.options)).options).value
        except ValueError as error:
            raise ValueError(f"{part.name}: {error}") from error
        components[part.name] = value
        total += part.weight * value
    return Score(total, components)


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "regex": regex,
    "gsm8k": gsm8k.score,
    "format": form,
    "length": length,
    "weighted": weighted,
}
