"""From what a user writes next to the reward of the turn before it.

Each turn of a session that may be judged is on a due list. When the session goes on, the judge model labels the next
message, through the queue as any request, in the batch class. A request that is sent again, and a session that ends
there, are labelled by rule. After `after_s` the turn's signals become its reward (shared/signals.py): an implied
verdict, which goes the way of all verdicts to the policy's trainer. A person's own verdict always stands.

Repeatable at every point: a signal replaces one of its kind, an answer is judged once, and an entry leaves the list
last. A judge that does not answer is asked again, for a day at most.
"""

import asyncio
import time
from collections.abc import Sequence

import structlog

from shared.episodes import JoinedTurn, Turn, joined
from shared.jobs import RewardSpec
from shared.process.loops import forever
from shared.redis.due.due_list import DueList
from shared.redis.kept.answer_store import AnswerStore, Verdict, answers_of
from shared.redis.kept.episode_store import EpisodeStore, StoredEpisode, episodes_of
from shared.redis.kept.kept_things import Terms
from shared.rewards.kinds import CheckedReward, check
from shared.scoring.pool import RewardSample
from shared.scoring.served import UNANSWERED
from shared.signals import MOST_TEXT, Signal, rewards_of
from shared.trajectories import Reward
from worker.jobs.context import TickContext

log = structlog.get_logger()

LIST = "judging"
AT_ONCE = 32
LOOK_S = 1.0
LEASE_MS = 300_000  # longer than a judge is waited for
AGAIN_MS = 30_000  # after a judge that did not answer
GIVEN_UP_MS = 86_400_000
MOST_TERMS = 16
LEAST_CONFIDENCE = 0.1  # of a reward that a trainer gets
CUTS = (MOST_TEXT, 1_024, 256)  # characters of each text; a judge of a short context reads the next shorter ones
SESSION = "session"  # the reward's name: such samples share a baseline

RUBRIC = """You judge whether a user is content with an assistant's reply, by what the user wrote next.

The user had written:
{prompt}

The assistant replied:
{reference}

Then the user wrote:
{completion}

Which describes this message best?
A: it accepts the reply: thanks, agreement, or the next step that builds on it
B: it corrects the reply: it says what is wrong with it, or how it should have been
C: it asks for the same again, since the reply did not help
D: it says nothing about the reply: another topic

Reply with "Answer: " and the letter."""
MARKS = {"A": "accept", "B": "correction", "C": "retry", "D": "other"}


class Judging:
    """Labels and rewards turns, in one runner. Without a judge model only rules label."""

    def __init__(self, context: TickContext, judge: str = "", after_s: float = 1800.0) -> None:
        self._context = context
        self._judge, self._after_ms = judge, int(1000 * after_s)
        self._due = DueList(context.redis, LIST)
        self._by_terms: dict[Terms, EpisodeStore] = {}

    async def add(self, tenant: str, terms: Terms, turn: Turn) -> None:
        """Put a new turn on the list, and its parent ahead: its next message has come."""
        if not self._judge:
            return
        episodes = self._stores(terms)
        episode = await episodes.read(episodes_of(tenant), turn.place.session)
        turns = await asyncio.to_thread(joined, episode.turns)  # their number is the client's choice
        me = next((each for each in turns if each.turn.name == turn.name), None)
        same = [each for each in episode.turns if each.place.mark == turn.place.mark and each.request != turn.request]
        for name in {me.parent if me else "", *(each.name for each in same)} - {""}:
            entry = _entry(tenant, terms, turn.place.session, name)
            await self._due.add(entry, self._after_ms, tenant)
            await self._due.hasten(entry)
        await self._due.add(_entry(tenant, terms, turn.place.session, turn.name), self._after_ms, tenant)

    async def run(self) -> None:
        """Judge until cancelled; while Redis is away, wait."""
        await forever("judging", "judge", self._judge_all, LOOK_S)

    async def judge(self) -> int:
        """Judge what is due, tenants in turns; returns how many turns that were."""
        entries = await self._due.take(AT_ONCE, LEASE_MS)
        ended = await asyncio.gather(*(self._consider(entry) for entry in entries), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error
        return len(entries)

    async def _judge_all(self) -> None:
        while self._judge and await self.judge():
            pass

    async def _consider(self, entry: str) -> None:
        try:
            tenant, terms, session, name = _read(entry)
        except ValueError as error:  # of a newer runner, or damaged
            log.error("judging.unreadable", error=str(error))
            await self._due.done(entry)
            return
        episodes = self._stores(terms)
        episode = await episodes.read(episodes_of(tenant), session)
        turns = await asyncio.to_thread(joined, episode.turns)
        turn = next((each for each in turns if each.turn.name == name), None)
        if turn is None:  # deleted, or let go
            await self._due.done(entry)
            return
        age_ms = time.time_ns() // 1_000_000 - turn.turn.ended_ms
        if not any(_says_more(signal) for signal in episode.signals.get(name, ())):
            signal = await self._next_message(turn.turn, turns, age_ms)
            if signal is None and age_ms < GIVEN_UP_MS and _following(turn.turn, turns):
                await self._due.again([entry], AGAIN_MS)
                return
            if signal is not None:
                await episodes.signal(episodes_of(tenant), session, name, signal)
                others = [each for each in episode.signals.get(name, ()) if each.kind != "next_message"]
                episode.signals[name] = [*others, signal]
        if age_ms < self._after_ms:
            await self._due.again([entry], self._after_ms - age_ms)
            return
        await self._reward(tenant, terms, turns, episode, name)
        await self._due.done(entry)

    async def _next_message(self, turn: Turn, turns: Sequence[JoinedTurn], age_ms: int) -> Signal | None:
        """The judged message after a turn; None when the judge does not answer, or nothing has followed yet."""
        later = [each.turn for each in turns if each.turn.created_ms > turn.created_ms]
        if any(turn.place.mark and each.place.mark == turn.place.mark for each in later):
            return Signal("next_message", labels={"retry": 1.0}, detail="the same request again")
        following = _following(turn, turns)
        if following is None:
            gone = age_ms >= self._after_ms and not any(each.parent == turn.name for each in turns)
            return Signal("next_message", labels={"left": 1.0}, detail="no next message") if gone else None
        text, rubric, error = _user_text(following), _rubric(self._judge), ""
        for most in CUTS:
            sample = RewardSample(text[-most:], turn.text[:most], _user_text(turn)[-most:], turn.model)
            (labelled,) = await self._context.rewards.score(rubric, [sample])
            if labelled.value is not None:
                return Signal("next_message", labels=_labels(labelled), text=text, judge=self._judge)
            error = labelled.error
            if error.startswith(UNANSWERED):
                break
        log.info("judging.unanswered", judge=self._judge, error=error)
        return None

    async def _reward(
        self, tenant: str, terms: Terms, turns: Sequence[JoinedTurn], episode: StoredEpisode, name: str
    ) -> None:
        calibration = await self._stores(terms).calibration(episodes_of(tenant))
        reward = rewards_of(turns, episode.signals, calibration).get(name)
        if reward is None or reward.confidence < LEAST_CONFIDENCE:
            return
        verdict = Verdict(round(reward.value, 4), by=SESSION, confidence=round(reward.confidence, 4))
        answers = AnswerStore(self._context.redis, terms)
        if await answers.find(answers_of(tenant), name) is not None:
            await answers.judge(answers_of(tenant), {name: verdict})

    def _stores(self, terms: Terms) -> EpisodeStore:
        """The store of these terms, which remembers its calibrations. An api has one terms, a ring few apis."""
        if terms not in self._by_terms:
            if len(self._by_terms) >= MOST_TERMS:
                self._by_terms.clear()
            self._by_terms[terms] = EpisodeStore(self._context.redis, terms)
        return self._by_terms[terms]


def _rubric(judge: str) -> CheckedReward:
    marks = {mark: float(label == "accept") for mark, label in MARKS.items()}
    return check(RewardSpec("judge", {"model": judge, "template": RUBRIC, "marks": marks, "lead": "Answer: "}))


def _labels(reward: Reward) -> dict[str, float]:
    return {label: round(reward.components.get(mark, 0.0), 4) for mark, label in MARKS.items()}


def _says_more(signal: Signal) -> bool:
    """True for what followed a turn; that nothing did holds only until something does."""
    return signal.kind == "next_message" and "left" not in signal.labels


def _following(turn: Turn, turns: Sequence[JoinedTurn]) -> Turn | None:
    """The first turn that follows this one with a message of the user."""
    after = (each.turn for each in turns if each.parent == turn.name)
    return next((each for each in after if any(said.role == "user" for said in each.place.said)), None)


def _user_text(turn: Turn) -> str:
    """The user's new messages of a request, else all that is new in it."""
    said = [each for each in turn.place.said if each.role == "user"] or turn.place.said
    return "\n\n".join(each.text for each in said)[-MOST_TEXT:]


def _entry(tenant: str, terms: Terms, session: str, name: str) -> str:
    return f"={tenant} {terms.ttl_s} {terms.bytes} {session} {name}"


def _read(entry: str) -> tuple[str, Terms, str, str]:
    tenant, ttl_s, size, session, name = entry.split(" ", 4)
    return tenant.removeprefix("="), Terms(int(ttl_s), int(size)), session, name
