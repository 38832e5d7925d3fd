"""Reward `exact`: the completion is the reference."""

from typing import Any

from shared.rewards.functions import Score
from shared.rewards.kinds import ExactOptions


def score(completion: str, reference: Any, options: ExactOptions) -> Score:
    """1 when the completion equals the reference, or one of the references in a list."""
    accepted = reference if isinstance(reference, list) else [reference]
    if not accepted or any(item is None or isinstance(item, dict | list) for item in accepted):
        raise ValueError("exact needs a reference: a text, a number, or a list of them")
    given = _plain(completion, options)
    return Score(float(any(given == _plain(str(item), options) for item in accepted)))


def _plain(text: str, options: ExactOptions) -> str:
    text = text.strip() if options.strip else text
    return text.casefold() if options.ignore_case else text
