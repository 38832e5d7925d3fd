"""Episodes: requests of one conversation, joined to a tree of turns.

An agent sends its whole history with each request. So the messages before an earlier reply of the history are exactly
those of the request that the reply answered, and a digest of them (a **mark**) finds that request: a turn's parent is
the turn whose own mark is the newest of its earlier marks. System messages are left out of marks, since agents change
them from turn to turn, and so is reasoning, which templates drop. A client that shortens its history (compaction) or
begins another one under the same session name (a sub-agent) begins a new branch. Prompts without messages are joined by
their token ids.

Invariants. Turns refer to each other by content alone, so they may be stored in any order and twice. What a turn
stores is bounded, whatever its client sent.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

MOST_TURNS = 512  # of one episode; later ones are not stored
MOST_MARKS = 8  # earlier marks that a turn knows
MOST_SAID = 16_384  # characters of the new messages of one request
MOST_TEXT = 8_192  # of a reply; its ids are with the answer
MOST_MATCHED = 200  # of a reply as its client sent it back
_PLAIN = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_IN_USER_ID = re.compile(rf"session[_a-z]{{0,4}}\W{{0,8}}({_UUID.pattern})")  # Claude Code's metadata.user_id

Branch = Literal["", "again", "rewritten", "agent"]


class PlainMessage(NamedTuple):
    """A message of a request, in the form that all protocols share."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments of each tool call


class Said(msgspec.Struct, frozen=True, array_like=True):
    """A message that is new in its request: role and text, which may be cut."""

    role: str
    text: str


class EpisodePlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place of a request in its episode, as far as the request itself shows it."""

    session: str  # id of the episode
    user: str = ""
    mark: str = ""  # of all its messages; "": a prompt without messages
    before: tuple[str, ...] = ()  # marks of the messages before each earlier reply, the latest first
    reply: str = ""  # how the latest of these replies begins, as the client sent it back
    said: tuple[Said, ...] = ()  # messages after that reply
    agent: str = ""  # digest of the system messages' beginning


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of an episode with its reply; ids and log-probabilities are with the answer of this name."""

    name: str
    place: EpisodePlace
    created_ms: int  # when its request came
    model: str
    policy: str
    ended_ms: int = 0  # when its reply was stored
    versions: tuple[str, ...] = ()
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    parent: str = ""  # of a prompt without messages: the turn whose ids its ids begin with
    ids_digest: str = ""  # of prompt and completion, without the token that ended it
    ids_length: int = 0  # number of these

    @property
    def request(self) -> str:
        """Name without the choice: the choices of one request share it."""
        return self.name.rpartition("-")[0]


class JoinedTurn(NamedTuple):
    """A turn in its tree."""

    turn: Turn
    parent: str  # name of the turn that it follows; "": it begins a branch
    branch: Branch  # why it does not just follow the turn before it


def session_id(named: str, user_id: str = "", cache_key: str = "") -> str:
    """The id of an episode that a client names; "": it names none.

    `named`: a header that means a session · `user_id`: of a client that puts its session there · `cache_key`: OpenAI's
    `prompt_cache_key`, a session if it is a UUID; other keys are shared by many conversations.
    """
    if not named and (found := _IN_USER_ID.search(user_id)):
        named = found[1]
    if not named and _UUID.fullmatch(cache_key):
        named = cache_key
    if not named or _PLAIN.fullmatch(named):
        return named
    return f"sess_{_digest(named)}"


def place_of(messages: Sequence[PlainMessage], *, session: str, user: str, owner: str) -> EpisodePlace:
    """The place of a chat. `session`: id that its client gave, "": the episode is named by its beginning.

    `owner`: the API key's name. Conversations of two users or keys never share a mark.
    """
    chain = hashlib.blake2b(f"{owner}\n{user}".encode(), digest_size=12)
    system = hashlib.blake2b(digest_size=12)
    before: list[str] = []
    reply, since, first = "", 0, ""
    for at, message in enumerate(messages):
        if message.role in ("system", "developer"):
            system.update(message.text[:MOST_MATCHED].encode(errors="replace"))
            continue
        if message.role == "assistant":
            before.append(chain.hexdigest())
            first = first or before[0]
            reply, since = (message.text.strip() or "".join(name for name, _ in message.calls)), at + 1
        chain.update(msgspec.json.encode([message.role, message.text.strip(), _same_calls(message.calls)]))
    mark = chain.hexdigest()
    return EpisodePlace(
        session=session or f"sess_{first or mark}",
        user=user[:128],
        mark=mark,
        before=tuple(before[: -MOST_MARKS - 1 : -1]),
        reply=reply[:MOST_MATCHED],
        said=_bounded(messages[since:]),
        agent=system.hexdigest(),
    )


def joined(turns: Iterable[Turn]) -> list[JoinedTurn]:
    """The turns in order of time, each with the turn that it follows."""
    found: list[JoinedTurn] = []
    by_mark: defaultdict[str, list[Turn]] = defaultdict(list)
    names: set[str] = set()
    for turn in sorted(turns, key=lambda turn: (turn.created_ms, turn.name)):
        parent = turn.parent if turn.parent in names else ""
        for nearest, mark in enumerate(turn.place.before):
            if parent or not (there := by_mark[mark]):
                continue
            said = [each for each in there if not nearest and turn.place.reply in each.text]
            parent = (said or there)[-1].name
        again = [each for each in by_mark[turn.place.mark] if each.request != turn.request]
        found.append(JoinedTurn(turn, parent, _branch(turn, parent, bool(again), found)))
        names.add(turn.name)
        if turn.place.mark:
            by_mark[turn.place.mark].append(turn)
    return found


def parent_by_ids(turns: Iterable[Turn], prompt_ids: Sequence[int]) -> str:
    """The turn with the longest prompt and completion that these ids begin with; "": there is none."""
    lengths = {turn.ids_length: turn for turn in turns if turn.ids_digest}
    digest, start, parent = hashlib.blake2b(digest_size=12), 0, ""
    for length in sorted(length for length in lengths if length <= len(prompt_ids)):
        digest.update(_packed(prompt_ids[start:length]))
        start = length
        if digest.hexdigest() == lengths[length].ids_digest:
            parent = lengths[length].name
    return parent


def digest_of_ids(ids: Sequence[int]) -> str:
    """Digest of token ids, as `parent_by_ids` compares it."""
    return hashlib.blake2b(_packed(ids), digest_size=12).hexdigest()


def _branch(turn: Turn, parent: str, again: bool, earlier: Sequence[JoinedTurn]) -> Branch:
    if again:
        return "again"
    if parent or not earlier or all(each.turn.request == turn.request for each in earlier):
        return ""
    return "rewritten" if any(each.turn.place.agent == turn.place.agent for each in earlier) else "agent"


def _same_calls(calls: Iterable[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Calls with their arguments as objects: clients write the same JSON with other spaces."""
    same: list[tuple[str, Any]] = []
    for name, arguments in calls:
        try:
            same.append((name, msgspec.json.decode(arguments)))
        except (msgspec.DecodeError, RecursionError):
            same.append((name, arguments))
    return same


def _bounded(messages: Sequence[PlainMessage]) -> tuple[Said, ...]:
    """Messages with MOST_SAID characters together, the latest ones first served."""
    left, said = MOST_SAID, list[Said]()
    for message in reversed(messages):
        if left <= 0:
            break
        if message.role in ("system", "developer"):
            continue
        said.append(Said(message.role, message.text[:left]))
        left -= len(message.text) + 16
    return tuple(reversed(said))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=12).hexdigest()


def _packed(ids: Sequence[int]) -> bytes:
    return b"".join(id.to_bytes(4, "little") for id in ids)
