"""Lessons from sessions (`--mode distill --dataset sessions:POLICY`): what the model would have said, had it known.

A user who corrects a reply says what was missing. So the teacher is asked the same again with the correction in the
prompt, and the student, without it, learns the teacher's distribution over that reply: hindsight as a teacher, as in
OpenClaw-RL (arXiv 2603.10165) and context distillation (arXiv 2209.15189). A reply that the user has edited is a lesson
likewise: the edited text, scored by a teacher that sees it coming. Where the teacher seldom does what a correction
says, it writes several replies (`drafts`), and the one that the correction makes likelier is learned as it stands: the
reply y with the largest log p(y | prompt, correction) - log p(y | prompt), their pointwise mutual information, as in
arXiv 1510.03055. A correction that quotes how the reply should have been (`quoted`) is such a draft that nobody has to
write. A reply that users were content with is learned as
it was, whatever its teacher would have said: the policy may have learned it since from others. The policy's own latest
version is a good teacher: as it learns, it follows more corrections. What it could do before is rehearsed
(`--rehearsal`): the base's own replies to prompts of a file, with the base's distributions.

Which reply was which follows from the session's rewards (shared/signals.py): below CORRECTED a lesson, from CONTENT on
a reply to say again, and nothing in between or without confidence. The rows of a session stand together, all learned
from or all held out, by the digest of its id.
"""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from shared.errors import NotFoundError, SetupError
from shared.seeds import derived_seed
from shared.text.codec import TextCodec
from trainer.learn.batches import Sample, SampleGroup
from trainer.learners.distilling import ScoredRow
from trainer.ring.http_client import HttpApi
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import Observation, read_jsonl
from trainer.runs.distillation.teacher import AT_ONCE, logprob, scored

CORRECTED, CONTENT = 0.4, 0.6
LEAST_CONFIDENCE = 0.1
HELD_OUT = 5  # one session of so many
MOST_SESSIONS = 2_000
LONGER = 2  # times the tokens of the reply that the teacher may take, and no less than LEAST_TOKENS
LEAST_TOKENS = 64
WRITING_S = 600.0  # that a teacher may take for its replies to one prompt, at night and behind everybody else
LEAST_GAIN = 2.0  # nats that a correction adds to a draft, or the teacher has not followed it
TEMPERATURE = 0.7
HINT = "{said}\n\n{correction}"  # the user's message that the teacher is shown
LEAST_QUOTED = 3  # words: fewer name a word, not a reply
_QUOTE = re.compile(r'"([^"]+)"|“([^”]+)”|„([^“]+)“|«([^»]+)»')
_REFUSED = re.compile(r"\b(?:not|never|stop|avoid|without|instead|than)\b|n['’]t\b", re.IGNORECASE)

log = structlog.get_logger()


class NothingToLearnError(SetupError):
    """The sessions hold too few lessons."""


class Listed(msgspec.Struct, frozen=True):
    """A line of `GET /v1/sessions`."""

    id: str
    policy: str


class _Page(msgspec.Struct):
    data: list[Listed]
    has_more: bool


class _Said(msgspec.Struct, frozen=True):
    role: str
    content: str


class _Signal(msgspec.Struct, frozen=True):
    kind: str
    text: str = ""


class _Reward(msgspec.Struct, frozen=True):
    value: float
    confidence: float


class SessionTurn(msgspec.Struct, frozen=True):
    """The fields of a turn that are read. Ids are there while its answer is stored."""

    name: str
    policy: str
    text: str
    finish_reason: str
    messages: list[_Said]
    follows: str | None = None
    signals: list[_Signal] = []
    reward: _Reward | None = None
    created_ms: int = 0
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()


class _Session(msgspec.Struct):
    turns: list[SessionTurn]
    has_more: bool


class Lesson(NamedTuple):
    """A turn to learn from: the prompt, and the prompt that the teacher gets."""

    session: str  # "": none, it is a prompt of `--rehearsal`
    name: str
    prompt_ids: tuple[int, ...]
    teacher_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]  # that the teacher scores; (): it writes one first
    most_tokens: int = 0  # of that
    as_it_stands: bool = False  # learned so: no teacher scores it
    quoted: tuple[tuple[int, ...], ...] = ()  # replies that the correction quotes


class LearnedFrom(msgspec.Struct):
    """Counts of what the sessions held, and of the rows that came of it."""

    sessions: int = 0
    turns: int = 0  # of them, with the next three
    corrected: int = 0
    edited: int = 0
    content: int = 0
    rows: int = 0
    rehearsed: int = 0  # rows of `--rehearsal` among them
    signals: dict[str, int] = {}  # by kind, of these turns


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None


class _Written(msgspec.Struct):
    choices: list[_Choice]


async def hindsight(
    api: HttpApi,
    policy: str,
    teacher: str,
    base: str,
    top_k: int,
    codec: TextCodec,
    tokenizer_sha256: str,
    *,
    longest: int,
    seed: int,
    since_ms: int = 0,
    at_least: int = 2,
    rehearsal: Sequence[Lesson] = (),
    drafts: int = 1,
) -> tuple[list[ScoredRow], LearnedFrom]:
    """Rows of the stored sessions of a policy, scored by the teacher.

    NothingToLearnError when there are fewer than `at_least`, without those of `rehearsal`, which are the `base`'s.
    `since_ms`: older turns are left out. `drafts`: replies that the teacher writes to a corrected prompt.
    """
    lessons, found = await lessons_of(api, policy, codec, since_ms)
    written = _fitting(await _written(api, teacher, lessons, longest, seed, drafts), longest)
    standing = [each for each in written if each.as_it_stands]
    taught = [each for each in written if not each.as_it_stands]
    are_enough = len(written) >= at_least
    again = _fitting(await _written(api, base, rehearsal if are_enough else (), longest, seed), longest)
    found.rows, found.rehearsed = len(written) + len(again), len(again)
    counts = msgspec.structs.asdict(found)
    log.info("hindsight.lessons", policy=policy, **counts)
    if not are_enough:
        said = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "signals")
        raise NothingToLearnError(
            f"the sessions of {policy} at {api.url} hold fewer than {at_least} lessons ({said}): rewards come from "
            "/v1/feedback and from --judge-model"
        )
    rows = [ScoredRow.as_said(teacher, each.prompt_ids, each.reply_ids, top_k) for each in standing]
    rows += await scored(api, teacher, top_k, [_group(lesson) for lesson in taught], tokenizer_sha256)
    rows += await scored(api, base, top_k, [_group(lesson) for lesson in again], tokenizer_sha256)
    return [
        msgspec.structs.replace(
            row, teacher=teacher, prompt_ids=lesson.prompt_ids, held_out=is_held_out(lesson.session)
        )
        for row, lesson in zip(rows, [*standing, *taught, *again], strict=True)
    ], found


def _fitting(lessons: Sequence[Lesson], longest: int) -> list[Lesson]:
    return [lesson for lesson in lessons if len(lesson.teacher_ids) + len(lesson.reply_ids) <= longest]


async def lessons_of(
    api: HttpApi, policy: str, codec: TextCodec, since_ms: int = 0
) -> tuple[list[Lesson], LearnedFrom]:
    """Lessons of the newest sessions, and how many turns were what."""
    lessons: list[Lesson] = []
    found, signals = LearnedFrom(), Counter[str]()
    for session in await _sessions(api, policy):
        try:
            turns = await _turns(api, session)
        except NotFoundError:  # it has expired meanwhile
            continue
        said: dict[str, str] = {}  # by the turn that it follows
        for turn in turns:
            if turn.follows and (text := _user_text(turn)):
                said.setdefault(turn.follows, text)
        turns = [turn for turn in turns if turn.created_ms >= since_ms]
        found.sessions += bool(turns)
        for turn in turns:
            found.turns += 1
            signals.update(signal.kind for signal in turn.signals)
            kind, lesson = lesson_of(session, turn, codec, said.get(turn.name, ""))
            if lesson is not None and turn.policy == policy:
                setattr(found, kind, getattr(found, kind) + 1)
                lessons.append(lesson)
    found.signals = dict(sorted(signals.items()))
    return lessons, found


async def rehearsed(file: Path, codec: TextCodec, variables: dict[str, Any], most_tokens: int) -> list[Lesson]:
    """Prompts of a file of tasks, to which the base is to reply as it does."""
    conversation, lessons = ChatEncoder(codec, variables), list[Lesson]()
    for number, task in enumerate(await asyncio.to_thread(read_jsonl, file), 1):
        ids = (await conversation.opening(Observation(task.prompt))).ids
        lessons.append(Lesson("", f"rehearsal-{number}", ids, ids, (), most_tokens))
    return lessons


def lesson_of(session: str, turn: SessionTurn, codec: TextCodec, said_next: str = "") -> tuple[str, Lesson | None]:
    """The lesson of a turn, with what the user did; None when there is nothing to learn from it.

    `said_next`: the user's next message. It counts when the judge has read it, or the user has given a verdict.
    """
    reward, prompt, reply = turn.reward, turn.prompt_ids, turn.completion_ids
    if reward is None or reward.confidence < LEAST_CONFIDENCE or not prompt or not reply:
        return "", None
    edited = next((signal.text for signal in turn.signals if signal.kind == "edit"), "")
    if edited and edited.strip() != turn.text.strip():
        hinted = hinted_ids(codec, turn, f"Reply exactly: {edited}")
        return "edited", Lesson(session, turn.name, prompt, hinted, _reply_ids(codec, turn, edited)) if hinted else None
    if reward.value >= CONTENT and turn.finish_reason == "stop":
        return "content", Lesson(session, turn.name, prompt, prompt, reply, as_it_stands=True)
    judged = any(signal.kind in ("next_message", "verdict") for signal in turn.signals)
    correction = said_next if judged else ""
    hinted = hinted_ids(codec, turn, correction) if correction and reward.value < CORRECTED else ()
    if not hinted:
        return "", None
    most, own = max(LEAST_TOKENS, LONGER * len(reply)), quoted(correction, turn.text)
    drafts = tuple(_reply_ids(codec, turn, each) for each in own)
    return "corrected", Lesson(session, turn.name, prompt, hinted, (), most, quoted=drafts)


def quoted(correction: str, reply: str) -> list[str]:
    """Replies that a correction quotes, as in: No, say "In short, it is a tree."

    What the reply itself had is left out, and what the words before it in its clause refuse (not "...").
    """
    found = []
    for match in _QUOTE.finditer(correction):
        text = next(filter(None, match.groups())).strip()
        clause = re.split(r"[.!?:;\n]", correction[: match.start()].rstrip(" :\n"))[-1]
        is_new = text.casefold() not in reply.casefold()
        if is_new and len(text.split()) >= LEAST_QUOTED and not _REFUSED.search(clause):
            found.append(text)
    return found


def _reply_ids(codec: TextCodec, turn: SessionTurn, text: str) -> tuple[int, ...]:
    """Ids of a text in place of a turn's reply, ended as that was, or by the model's end token."""
    end = turn.completion_ids[-1:] if turn.finish_reason == "stop" else codec.end
    return (*codec.encode(codec.without_special(text), False), *end)


def hinted_ids(codec: TextCodec, turn: SessionTurn, correction: str) -> tuple[int, ...]:
    """The turn's prompt with the correction after the user's last message; () when that is not found in it.

    Special tokens spelled in the correction are taken out: it cannot end the user's message.
    """
    said = _user_text(turn)
    text = codec.decode(turn.prompt_ids, False)
    before, found, after = text.rpartition(said) if said else ("", "", "")
    if not found:
        return ()
    hint = HINT.format(said=said, correction=codec.without_special(correction).strip())
    return tuple(codec.encode(before + hint + after, False))


def _user_text(turn: SessionTurn) -> str:
    """The user's last new message of a turn's request."""
    return next((each.content for each in reversed(turn.messages) if each.role == "user"), "").strip()


def is_held_out(session: str) -> bool:
    """True for the sessions that versions are compared on."""
    return bool(session) and hashlib.sha256(session.encode()).digest()[0] % HELD_OUT == 0


async def _sessions(api: HttpApi, policy: str) -> list[str]:
    found: list[str] = []
    after, more = "", True
    while more and len(found) < MOST_SESSIONS:
        page = await api.call("GET", "/v1/sessions", _Page, after=after, limit=100)
        found += [each.id for each in page.data if each.policy == policy]
        more, after = page.has_more and bool(page.data), page.data[-1].id if page.data else ""
    return found[:MOST_SESSIONS]


async def _turns(api: HttpApi, session: str) -> list[SessionTurn]:
    turns: list[SessionTurn] = []
    after, more = "", True
    while more:
        page = await api.call("GET", f"/v1/sessions/{session}", _Session, tokens="true", after=after, limit=64)
        turns += page.turns
        more, after = page.has_more, page.turns[-1].name if page.turns else ""
    return turns


async def _written(
    api: HttpApi, teacher: str, lessons: Sequence[Lesson], longest: int, seed: int, drafts: int = 1
) -> list[Lesson]:
    """The lessons with the teacher's own replies where they had none, left out if the teacher did not end them."""
    room = asyncio.Semaphore(max(1, AT_ONCE // drafts))  # more at once would wait for one another past WRITING_S

    async def one(at: int, lesson: Lesson) -> Lesson | None:
        if lesson.reply_ids:
            return lesson
        most = min(lesson.most_tokens, longest - len(lesson.teacher_ids))
        if most < 1:
            return None
        if own := [each for each in lesson.quoted if len(lesson.teacher_ids) + len(each) < longest]:
            async with room:
                if chosen := await _likelier(api, teacher, lesson, own):
                    return chosen
        count = drafts if lesson.session else 1
        sampling: dict[str, Any] = {
            "max_tokens": most, "temperature": TEMPERATURE, "seed": derived_seed(seed, at) % 2**31, "n": count
        }  # fmt: skip
        body = {"model": teacher, "token_ids": lesson.teacher_ids, "sampling_params": sampling}
        async with room:
            written = await api.call("POST", "/inference/v1/generate", _Written, body, timeout_s=WRITING_S)
            choices = written.choices
            # the beginning of a rehearsed reply is as good as the whole
            replies = [tuple(each.token_ids) for each in choices if each.finish_reason == "stop" or not lesson.session]
            if count > 1:
                return await _likelier(api, teacher, lesson, sorted(set(replies)))
        return lesson._replace(reply_ids=replies[0]) if replies else None

    done = await asyncio.gather(*(one(at, lesson) for at, lesson in enumerate(lessons)))
    return [lesson for lesson in done if lesson is not None and lesson.reply_ids]


async def _likelier(api: HttpApi, teacher: str, lesson: Lesson, drafts: Sequence[tuple[int, ...]]) -> Lesson | None:
    async def gain(draft: tuple[int, ...]) -> float:
        prompts = lesson.teacher_ids, lesson.prompt_ids
        corrected, plain = await asyncio.gather(*(logprob(api, teacher, prompt, draft) for prompt in prompts))
        return corrected - plain

    chosen = likelier(drafts, await asyncio.gather(*map(gain, drafts)))
    return None if chosen is None else lesson._replace(reply_ids=chosen, as_it_stands=True)


def likelier(drafts: Sequence[tuple[int, ...]], gains: Sequence[float]) -> tuple[int, ...] | None:
    """The draft to which the correction adds most; None if it adds less than LEAST_GAIN to each."""
    gain, draft = max(zip(gains, drafts, strict=True), default=(0.0, ()))
    return draft if gain >= LEAST_GAIN else None


def _group(lesson: Lesson) -> SampleGroup:
    zeros = (0,) * len(lesson.reply_ids)
    sample = Sample(lesson.reply_ids, tuple(map(float, zeros)), (True,) * len(zeros), zeros, 0.0)
    return SampleGroup(lesson.name, lesson.teacher_ids, (sample,))
