"""Reward `math`: the completion's final expression equals the reference, decided by math-verify."""

import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from shared.rewards import MathOptions
from worker.jobs.rewards import Score

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off: the pool has its own

_WANTED = (LatexExtractionConfig(), ExprExtractionConfig())


def score(completion: str, reference: Any, options: MathOptions) -> Score:
    """1 when both are the same mathematically; the pool's own timeout stands in for math-verify's."""
    if reference is None:
        raise ValueError("math needs a reference")
    gold = _parse(str(reference)) or _parse(f"${reference}$")  # bare LaTeX too
    if not gold:
        raise ValueError(f"no mathematical expression in the reference {str(reference)[:80]!r}")
    answer = _parse(completion)
    if not answer:
        return Score(0.0, {"parsed": 0.0})
    equal = verify(gold, answer, float_rounding=options.precision, timeout_seconds=None)
    return Score(1.0 if equal else options.format_score, {"parsed": 1.0})


def _parse(text: str) -> list[Any]:
    found: list[Any] = parse(text, extraction_config=_WANTED, parsing_timeout=None)
    return found
