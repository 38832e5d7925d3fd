"""Reward `math`: the completion's final expression equals the reference, decided by math-verify."""

import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from shared.rewards.kinds import MathOptions, Score

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off: the pool has its own

_WANTED = (LatexExtractionConfig(), ExprExtractionConfig())
_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}")


def score(completion: str, reference: Any, options: MathOptions) -> Score:
    """1 when both are the same mathematically; the pool's own timeout stands in for math-verify's."""
    if reference is None:
        raise ValueError("math needs a reference")
    gold = _gold(str(reference))
    if not gold:
        raise ValueError(f"no mathematical expression in the reference {str(reference)[:80]!r}")
    answer = _parse(completion)
    if not answer:
        return Score(0.0, {"parsed": 0.0})
    equal = verify(gold, answer, float_rounding=options.precision, timeout_seconds=None)
    return Score(1.0 if equal else options.format_score, {"parsed": 1.0})


def _gold(reference: str) -> list[Any]:
    """A bare expression is read as a whole: in `2\\sqrt{3}` without its dollars math-verify would find the 2."""
    bare = not (_MARKED.search(reference) or _PROSE.search(reference))
    tries = (f"${reference}$", reference) if bare else (reference, f"${reference}$")
    return _parse(tries[0]) or _parse(tries[1])


def _parse(text: str) -> list[Any]:
    expressions: list[Any] = parse(text, extraction_config=_WANTED, parsing_timeout=None)
    return expressions
