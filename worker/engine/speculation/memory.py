"""What sequences have written, by their prompts: another one of the same prompt may write the same.

The same prompts are sampled again and again: by a trainer's epochs, by the samples of a group, by a request that is
asked for once more. Adapter versions do not matter here, since a draft is only ever a guess.

Other workers of the ring have written some of it (worker/ring_memory.py).

Invariants. Completions are kept by tenant: nobody's text is drafted for anybody else, nor shows in how soon somebody
else's tokens come. What is kept is bounded in bytes, what it is looked through by included; the prompts that were asked
for longest ago go first. A step joins the completions of a few prompts at most, and what the rows of a step look
through is not made again and again: rows for which there is no room go without.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.sequences import SequenceSpec
from worker.engine.speculation.lookup import BEGINNING, BREAK, RUNS_BYTES, Beginnings, Ids, Text

KEPT = 32  # latest completions of one prompt
COMPLETION_BYTES = 1_200  # beside its ids, what is kept of its prompt included
AT_ONCE = 8  # prompts whose completions are joined in one step: each takes some tenths of a millisecond
JOINED_SHARE = 2  # of all bytes, the part that what is joined may take
FARTHEST = 1 << 14  # ids, the latest ones, that are looked through
MARK_BYTES = 8
ID_BYTES = 4
ANCHOR = 32  # ids of the prompt's end before each, by which its beginning is found
LATER = 256  # sequences that have ended, the latest ones, whose texts wait for a row that asks
LATER_IDS = 1 << 15  # of their prompts and texts, about

Key = bytes  # digest of model, tenant and prompt
Mark = bytes  # of a sequence, so that what it has written is kept once


def key_of(spec: SequenceSpec) -> Key:
    """Where completions of a sequence's prompt are kept; those of another tenant, or model, are kept elsewhere."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (spec.model.encode(), spec.tenant.encode()):
        digest.update(b"%d:%s" % (len(name), name))
    digest.update(np.array(spec.kv_prompt, np.int64).tobytes())
    return digest.digest()


def mark_of(seq: str) -> Mark:
    """Of the sequence with this id."""
    return hashlib.blake2b(seq.encode(), digest_size=MARK_BYTES).digest()


@dataclass(frozen=True)
class Completions:
    """What sequences have written behind one prompt, the latest last."""

    key: Key
    prompt_ids: Sequence[int]
    texts: list[tuple[Mark, Ids]]


class Joined:
    """Completions of one prompt, ready to be looked through."""

    def __init__(self, anchor: Ids, texts: Sequence[Ids], lengths: tuple[int, ...]) -> None:
        """The latest `FARTHEST` ids, each completion behind the prompt's end; `lengths` of runs are looked for."""
        self._parts: list[Ids] = []
        self._text: Text | None = None
        left = FARTHEST
        for ids in reversed(texts):
            self._parts += [ids[-left:], anchor]
            left -= len(ids) + len(anchor)
            if left <= 0:
                break
        self.beginnings = Beginnings(texts)
        ids_bytes = ID_BYTES * min(FARTHEST, FARTHEST - left)
        self.bytes = ids_bytes + len(lengths) * RUNS_BYTES + self.beginnings.nbytes  # made by and by

    @property
    def text(self) -> Text:
        """All in one, made only now: a row that has begun as one of them does is not looked for in it."""
        if self._text is None:
            self._text = Text(np.concatenate(self._parts[::-1])[-FARTHEST:])
            self._parts.clear()
        return self._text


class Known:
    """All that is kept of one prompt."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._anchor = text_behind(prompt_ids, ())
        self._texts: OrderedDict[Mark, Ids] = OrderedDict()  # the latest last
        self.joined: Joined | None = None
        self.is_joined = False  # with all that is kept now
        self.asked = 0  # the step in which a row has asked last

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, mark: Mark) -> bool:
        return mark in self._texts

    def add(self, mark: Mark, ids: Ids) -> None:
        """One more completion."""
        self._texts[mark], self.is_joined = ids, False

    def forget_oldest(self) -> int:
        """The bytes that this has freed."""
        _, ids = self._texts.popitem(last=False)
        self.is_joined = False
        return bytes_of(ids)

    def join(self, lengths: tuple[int, ...]) -> Joined:
        """Make it ready to be looked through."""
        self.joined, self.is_joined = Joined(self._anchor, list(self._texts.values()), lengths), True
        return self.joined


def bytes_of(ids: Ids) -> int:
    """What a completion takes while it is kept."""
    return ids.nbytes + COMPLETION_BYTES


def text_behind(prompt_ids: Sequence[int], ids: Sequence[int]) -> Ids:
    """A text to draft from that goes on after this prompt."""
    return np.array([BREAK, *prompt_ids[-ANCHOR:], *ids], np.int32)


class Memory:
    """Of one engine."""

    def __init__(self, limit_bytes: int, lengths: tuple[int, ...]) -> None:
        """`lengths`: of the runs of ids that are looked for."""
        self._limit_bytes = limit_bytes
        self._lengths = lengths
        self._known: OrderedDict[Key, Known] = OrderedDict()  # the latest used last
        self._joined: OrderedDict[Key, Known] = OrderedDict()  # those with something joined, the same way
        self._due: OrderedDict[Key, None] = OrderedDict()  # prompts that wait to be joined, the first come first
        self._later: deque[tuple[SequenceSpec, list[int]]] = deque()
        self._later_ids = 0
        self._step = self._left = 0  # of `AT_ONCE`, in this step
        self._joined_bytes = 0
        self.bytes = 0  # of all

    def add_later(self, spec: SequenceSpec, tokens: list[int]) -> None:
        """What a sequence has written that has ended: taken in when rows ask, which they may not do for long."""
        self._later.append((spec, tokens))
        self._later_ids += len(spec.prompt_ids) + len(tokens)
        while len(self._later) > 1 and (len(self._later) > LATER or self._later_ids > LATER_IDS):
            self._pop_later()

    def _pop_later(self) -> tuple[SequenceSpec, list[int]]:
        spec, tokens = self._later.popleft()
        self._later_ids -= len(spec.prompt_ids) + len(tokens)
        return spec, tokens

    def begin(self) -> None:
        """A step begins in which rows ask; what was not asked for in the one before waits no longer."""
        while self._later:
            spec, tokens = self._pop_later()
            text = mark_of(spec.id), np.array(tokens, np.int32)
            self.add(Completions(key_of(spec), spec.prompt_ids, [text]))
        self._step, self._left = self._step + 1, AT_ONCE
        for key in [key for key in self._due if key not in self._known or self._known[key].asked < self._step - 1]:
            del self._due[key]

    def add(self, completions: Completions) -> None:
        """What sequences have written; what is known already changes nothing."""
        key = completions.key
        known = self._known.setdefault(key, Known(completions.prompt_ids))
        self._known.move_to_end(key)
        for mark, ids in completions.texts:
            if mark in known or bytes_of(ids) > self._limit_bytes:
                continue
            known.add(mark, ids)
            self.bytes += bytes_of(ids)
            if len(known) > KEPT:
                self.bytes -= known.forget_oldest()
        self._keep_to_limit()
        if not known:
            self._known.pop(key, None)

    def joined(self, key: Key) -> Joined | None:
        """What a row looks through that has this prompt; None: nothing is known, or nothing is ready yet."""
        known = self._known.get(key)
        if known is None:
            return None
        self._known.move_to_end(key)
        if key in self._joined:
            self._joined.move_to_end(key)
        known.asked = self._step
        if not known.is_joined:
            self._due[key] = None
        while self._due and self._left > 0:
            self._join(self._due.popitem(last=False)[0])
        return known.joined  # an older one until its turn has come

    def _join(self, key: Key) -> None:
        known = self._known.get(key)
        if known is None or not self._has_room(known):
            return
        self._left -= 1
        self._forget_joined(key)
        joined = known.join(self._lengths)
        self._joined[key] = known
        self._joined_bytes += joined.bytes
        self.bytes += joined.bytes
        self._keep_to_limit()

    def _has_room(self, known: Known) -> bool:
        """Whether this may be joined beside what rows of this step and of the one before have asked for."""
        largest = FARTHEST * ID_BYTES + len(self._lengths) * RUNS_BYTES + KEPT * (BEGINNING + 1) * ID_BYTES
        most = self._limit_bytes // JOINED_SHARE - largest + (known.joined.bytes if known.joined is not None else 0)
        while self._joined_bytes > most:
            oldest, of_it = next(iter(self._joined.items()), (b"", known))
            if of_it.asked >= self._step - 1:
                return False
            self._forget_joined(oldest)
        return True

    def _forget_joined(self, key: Key) -> None:
        known = self._joined.pop(key, None)
        if known is not None and known.joined is not None:
            self._joined_bytes -= known.joined.bytes
            self.bytes -= known.joined.bytes
            known.joined, known.is_joined = None, False

    def _keep_to_limit(self) -> None:
        while self.bytes > self._limit_bytes:
            oldest, of_it = next(iter(self._known.items()))
            self.bytes -= of_it.forget_oldest()
            if not of_it:
                self._forget_joined(oldest)
                del self._known[oldest]
