"""Reward `gsm8k`: the final number of the completion is the reference's."""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from shared.rewards.kinds import Gsm8kOptions, Score

MARK = "####"
_NUMBER = re.compile(r"[-+\u2212]?\s?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s?/\s?\d[\d,]*)?")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def score(completion: str, reference: Any, options: Gsm8kOptions) -> Score:
    """1 for the reference's number, `format_score` for another one, 0 for none."""
    wanted = final_number(str(reference)) if reference is not None else None
    if wanted is None:
        raise ValueError(f"gsm8k needs a reference with a number, not {str(reference)[:80]!r}")
    given = final_number(completion, strict=options.strict)
    components = {"found": float(given is not None), "marked": float(MARK in completion)}
    if given is None:
        return Score(0.0, components)
    return Score(1.0 if given == wanted else options.format_score, components)


def final_number(text: str, *, strict: bool = False) -> Fraction | None:
    r"""The number after the last `####`, else in the last `\boxed{}`, else the last one; None without any."""
    if MARK in text:
        match = _NUMBER.search(text.rsplit(MARK, 1)[1])
        if match is not None or strict:
            return _value(match.group()) if match is not None else None
    if strict:
        return None
    boxed = _BOXED.findall(text)
    for part in ([boxed[-1]] if boxed else []) + [text]:
        numbers = _NUMBER.findall(part)
        if numbers:
            return _value(_unsigned_range(part, numbers))
    return None


def _unsigned_range(text: str, numbers: list[str]) -> str:
    """The last number; in `5-3` or `10 - 4` the dash joins two numbers and is no sign."""
    last = numbers[-1]
    before = text[: text.rindex(last)].rstrip()
    if last[0] in "+-\u2212" and before and (before[-1].isalnum() or before[-1] in ")%"):
        return last[1:]
    return last


def _value(number: str) -> Fraction | None:
    plain = re.sub(r"[\s,$+]", "", number.replace("\u2212", "-"))
    try:
        if "/" not in plain:
            return Fraction(Decimal(plain))
        top, bottom = plain.split("/")
        return Fraction(Decimal(top)) / Fraction(Decimal(bottom))
    except (InvalidOperation, ZeroDivisionError, ValueError):
        return None
