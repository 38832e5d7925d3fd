"""Preferences that users have given on a policy's answers (`POST /v1/feedback`, `preferred_over`), as pairs for dpo.

The api of the ring lists the judged answers of whoever asks: with tenants, those of the key's tenant. A run takes them
once, before it begins, and keeps them in its folder as a data set of token ids. So each pair is learned from as often
as a line of a file would be, a resumed run goes on with the same ones, and what users say later is for the next run.
Nothing is taken away: a trainer with `--source live` gets the same verdicts.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from shared.errors import NotFoundError, SetupError
from shared.text.codec import TextCodec
from trainer.ring.http_client import HttpApi

FILE = "feedback.jsonl"  # in the run's folder
PAGE = 100
_TRIES = 5  # of a listing whose next page began after an answer that had just expired

log = structlog.get_logger()


class JudgedAnswer(msgspec.Struct, frozen=True):
    """The fields of a line of `GET /v1/feedback` that are read."""

    name: str
    created_ms: int
    policy: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    preferred_over: str | None = None
    preferred_under: str | None = None


class PairLine(msgspec.Struct, frozen=True):
    """A line of the file: a pair as token ids (trainer/learners/tuning_examples.py reads it)."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    policy: str
    chosen: str  # names of the answers
    rejected: str


class Pairs(NamedTuple):
    """Preference pairs, with the numbers of those that were left out."""

    lines: tuple[PairLine, ...]
    too_old: int = 0
    halved: int = 0  # one of the two answers has expired
    foreign: int = 0  # ids that this model's tokenizer reads as another text
    equal: int = 0  # both answers are the same tokens
    empty: int = 0  # an answer has no token, or no token stands before it


class _Page(msgspec.Struct):
    data: list[JudgedAnswer]
    has_more: bool


async def judged_answers(api: HttpApi, policy: str) -> dict[str, JudgedAnswer]:
    """The answers of a policy that are part of a preference, by name."""
    for _ in range(_TRIES):
        found: dict[str, JudgedAnswer] = {}
        after, more = "", True
        try:
            while more:
                page = await api.call("GET", "/v1/feedback", _Page, state="judged", after=after, limit=PAGE)
                for answer in page.data:
                    if answer.policy == policy and (answer.preferred_over or answer.preferred_under):
                        found[answer.name] = answer
                more = page.has_more and bool(page.data)
                after = page.data[-1].name if page.data else ""
        except NotFoundError:
            continue
        return found
    raise SetupError(f"{api.url} lets go of answers faster than they can be listed: see its --feedback-store-mb")


def pairs_of(answers: Mapping[str, JudgedAnswer], codec: TextCodec, oldest_ms: int) -> Pairs:
    """The preferences, the oldest first. An answer's age is that of the answer, not of the verdict."""
    lines: list[PairLine] = []
    too_old = halved = foreign = equal = empty = 0
    for chosen in sorted(answers.values(), key=lambda answer: (answer.created_ms, answer.name)):
        if not chosen.preferred_over:
            continue
        rejected = answers.get(chosen.preferred_over)
        if rejected is None:
            halved += 1
        elif min(chosen.created_ms, rejected.created_ms) < oldest_ms:
            too_old += 1
        elif not (chosen.prompt_ids and chosen.completion_ids and rejected.completion_ids):
            empty += 1
        elif not all(_reads_as_said(answer, codec) for answer in (chosen, rejected)):
            foreign += 1
        elif chosen.completion_ids == rejected.completion_ids:
            equal += 1
        else:
            ids = (chosen.prompt_ids, chosen.completion_ids, rejected.completion_ids)
            lines.append(PairLine(*ids, chosen.policy, chosen.name, rejected.name))
    return Pairs(tuple(lines), too_old, halved, foreign, equal, empty)


async def preferences(api: HttpApi, policy: str, codec: TextCodec, max_age_days: float, now_ms: int) -> bytes:
    """The data set; SetupError without pairs, with the counts of what was left out."""
    answers = await judged_answers(api, policy)
    pairs = pairs_of(answers, codec, now_ms - int(86_400_000 * max_age_days))
    left_out = {name: count for name, count in pairs._asdict().items() if name != "lines" and count}
    log.info("feedback.pairs", policy=policy, pairs=len(pairs.lines), **left_out)
    if not pairs.lines:
        why = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in left_out.items())
        raise SetupError(
            f"no preference between two answers of {policy} is stored at {api.url}"
            + (f" that can be learned from ({why})" if why else ": POST /v1/feedback with 'preferred_over' says one")
        )
    return _encoded(pairs.lines)


def check_kept(file: Path, policy: str) -> None:
    """SetupError unless the file holds the preferences that the run began with, of this policy."""
    try:
        with file.open("rb") as lines:
            of = msgspec.json.decode(lines.readline(), type=PairLine).policy
    except OSError as error:
        raise SetupError(
            f"{file.parent} holds a run on another data set: give another --run, or --resume no"
        ) from error
    except msgspec.DecodeError as error:
        raise SetupError(f"{file} is no file of preferences: give another --run, or --resume no ({error})") from error
    if of != policy:
        raise SetupError(f"{file.parent} holds a run on preferences of {of}: give another --run, or --resume no")


def _encoded(lines: Iterable[PairLine]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _reads_as_said(answer: JudgedAnswer, codec: TextCodec) -> bool:
    """True if the ids are of this model's tokenizer. A text may end earlier, at a stop string."""
    if any(codec.token(id_) is None for id_ in (*answer.prompt_ids, *answer.completion_ids)):
        return False
    return codec.decode(answer.completion_ids).strip().startswith(answer.text.strip())
