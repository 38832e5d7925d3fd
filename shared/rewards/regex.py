"""Reward `regex`: a pattern is found in the completion."""

import re
from typing import Any

from shared.rewards.functions import Score
from shared.rewards.kinds import RegexOptions


def score(completion: str, reference: Any, options: RegexOptions) -> Score:
    """1 when the pattern matches, and its group, if one is named, equals the reference."""
    pattern = options.pattern or reference
    if not isinstance(pattern, str) or not pattern:
        raise ValueError("regex needs a pattern in its options or as the reference")
    try:
        compiled = re.compile(pattern, options.flags)
    except re.error as error:
        raise ValueError(f"the reference is no pattern: {error}") from error
    found = compiled.fullmatch(completion) if options.full else compiled.search(completion)
    if found is None:
        return Score(0.0, {"matched": 0.0})
    if options.group is None:
        return Score(1.0, {"matched": 1.0})
    if reference is None:
        raise ValueError("regex with a group needs a reference to compare it with")
    captured = found[options.group]
    right = captured is not None and captured.strip() == str(reference).strip()
    return Score(float(right), {"matched": 1.0})
