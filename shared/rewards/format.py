"""Reward `format`: the completion has the wanted tags and pattern."""

import re
from typing import Any

from shared.rewards.functions import Score
from shared.rewards.kinds import FormatOptions


def score(completion: str, reference: Any, options: FormatOptions) -> Score:
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
    """Where the tag's one pair ends, when it stands after `after`."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.index(opening), text.index(closing)
    return end + len(closing) if after <= start < end else None
