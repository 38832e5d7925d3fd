"""Completions of sequences, by their prompts: another sequence of the same prompt may write the same.

The same prompts are sampled again and again: by a trainer's epochs, by the samples of a group, by a request that is
asked for once more. Adapter versions do not matter here, since a draft is only ever a guess.

Other workers of the ring have written some of it (worker/ring_memory.py).

Invariants. Completions are kept by tenant: nobody's text is drafted for anybody else, nor shows in how soon somebody
else's tokens come. What is kept is bounded in bytes, what it is looked through by included; where that is too much, the
tenant that holds most gives up the prompts that it has asked for longest ago. A step joins the completions of a few
prompts at most, tenants in turn, and what the rows of a step look through is not made again and again: rows for which
there is no room go without, unless other tenants' rows have more of it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
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
OWNER_BYTES = 8
IDLE = 1 << 14  # steps in which rows have asked: who has not for so long gives up what it holds before others do

Owner = bytes  # digest of a tenant
Key = bytes  # that, and digest of model, tenant and prompt
Mark = bytes  # of a sequence, so that what it has written is kept once


def key_of(spec: SequenceSpec) -> Key:
    """Where completions of a sequence's prompt are kept; those of another tenant, or model, are kept elsewhere."""
    owner = hashlib.blake2b(spec.tenant.encode(), digest_size=OWNER_BYTES).digest()
    digest = hashlib.blake2b(digest_size=16)
    for name in (spec.model.encode(), spec.tenant.encode()):
        digest.update(b"%d:%s" % (len(name), name))
    digest.update(np.array(spec.kv_prompt, np.int64).tobytes())
    return owner + digest.digest()


def owner_of(key: Key) -> Owner:
    return key[:OWNER_BYTES]


def mark_of(seq: str) -> Mark:
    return hashlib.blake2b(seq.encode(), digest_size=MARK_BYTES).digest()


@dataclass(frozen=True)
class Completions:
    """Texts that sequences have written behind one prompt, the latest last."""

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
        self._texts[mark], self.is_joined = ids, False

    def forget_oldest(self) -> int:
        _, ids = self._texts.popitem(last=False)
        self.is_joined = False
        return bytes_of(ids)

    def join(self, lengths: tuple[int, ...]) -> Joined:
        """Make it ready to be looked through."""
        self.joined, self.is_joined = Joined(self._anchor, list(self._texts.values()), lengths), True
        return self.joined


def bytes_of(ids: Ids) -> int:
    return ids.nbytes + COMPLETION_BYTES


def text_behind(prompt_ids: Sequence[int], ids: Sequence[int]) -> Ids:
    """A text to draft from that goes on after this prompt."""
    return np.array([BREAK, *prompt_ids[-ANCHOR:], *ids], np.int32)


class Shelf:
    """All that is kept of one tenant."""

    def __init__(self) -> None:
        self.known: OrderedDict[Key, Known] = OrderedDict()  # the latest used last
        self.joined: OrderedDict[Key, Known] = OrderedDict()  # those with something joined, the same way
        self.due: OrderedDict[Key, None] = OrderedDict()  # prompts that wait to be joined, the first come first
        self.used = 0  # the step in which it was, last
        self.bytes = self.joined_bytes = 0  # the former of all


class Memory:
    """Completions that one engine may draft from."""

    def __init__(self, limit_bytes: int, lengths: tuple[int, ...]) -> None:
        """`lengths`: of the runs of ids that are looked for."""
        self._limit_bytes = limit_bytes
        self._lengths = lengths
        self._shelves: OrderedDict[Owner, Shelf] = OrderedDict()  # the latest used last
        self._due: OrderedDict[Owner, None] = OrderedDict()  # who waits for prompts to be joined, in turn
        self._step = self._left = 0  # of `AT_ONCE`, in this step
        self._joined_bytes = 0
        self.bytes = 0  # of all

    def knows(self, key: Key) -> bool:
        """True if something has been written behind that prompt."""
        shelf = self._shelves.get(owner_of(key))
        return shelf is not None and key in shelf.known

    def begin(self) -> None:
        """A step begins in which rows ask; what was not asked for in the one before waits no longer."""
        self._step, self._left = self._step + 1, AT_ONCE
        for owner in list(self._due):
            shelf = self._shelves[owner]
            for key in [key for key in shelf.due if not self._is_asked(shelf.known.get(key))]:
                del shelf.due[key]
            if not shelf.due:
                del self._due[owner]

    def _is_asked(self, known: Known | None) -> bool:
        """For a prompt, in this step or in the one before."""
        return known is not None and known.asked >= self._step - 1

    def add(self, completions: Completions) -> None:
        """Keep what sequences have written; what is known already changes nothing."""
        key, owner = completions.key, owner_of(completions.key)
        shelf = self._shelves.setdefault(owner, Shelf())
        known = shelf.known.setdefault(key, Known(completions.prompt_ids))
        self._use(owner, shelf, key)
        for mark, ids in completions.texts:
            if mark in known or bytes_of(ids) > self._limit_bytes:
                continue
            known.add(mark, ids)
            self._count(shelf, bytes_of(ids))
            if len(known) > KEPT:
                self._count(shelf, -known.forget_oldest())
        if not known:
            self._forget(owner, shelf, key)
        self._keep_to_limit()

    def _use(self, owner: Owner, shelf: Shelf, key: Key) -> None:
        self._shelves.move_to_end(owner)
        shelf.known.move_to_end(key)
        shelf.used = self._step

    def _count(self, shelf: Shelf, more: int) -> None:
        shelf.bytes += more
        self.bytes += more

    def joined(self, key: Key) -> Joined | None:
        """Texts that a row looks through that has this prompt; None: nothing is known, or nothing is ready yet."""
        owner = owner_of(key)
        shelf = self._shelves.get(owner)
        known = None if shelf is None else shelf.known.get(key)
        if shelf is None or known is None:
            return None
        self._use(owner, shelf, key)
        if key in shelf.joined:
            shelf.joined.move_to_end(key)
        known.asked = self._step
        if not known.is_joined:
            shelf.due[key] = self._due[owner] = None
        while self._due and self._left > 0:
            self._join_next(self._due.popitem(last=False)[0])
        return known.joined  # an older one until its turn has come

    def _join_next(self, owner: Owner) -> None:
        """The prompt of this tenant that has waited longest."""
        shelf = self._shelves[owner]
        key, _ = shelf.due.popitem(last=False)
        if shelf.due:
            self._due[owner] = None
        self._left -= 1
        known = shelf.known.get(key)
        if known is None or not self._has_room(shelf, known):
            return
        self._forget_joined(shelf, key)
        joined = known.join(self._lengths)
        shelf.joined[key] = known
        self._count_joined(shelf, joined.bytes)
        self._keep_to_limit()

    def _count_joined(self, shelf: Shelf, more: int) -> None:
        shelf.joined_bytes += more
        self._joined_bytes += more
        self._count(shelf, more)

    def _has_room(self, shelf: Shelf, known: Known) -> bool:
        """True if this may be joined in addition to what rows of this step and of the one before have asked for.

        If not, a tenant that has more of the room, and would have after it, gives up some.
        """
        largest = FARTHEST * ID_BYTES + len(self._lengths) * RUNS_BYTES + KEPT * (BEGINNING + 1) * ID_BYTES
        most = self._limit_bytes // JOINED_SHARE - largest + (known.joined.bytes if known.joined is not None else 0)
        while self._joined_bytes > most:
            holders = [each for each in self._shelves.values() if each.joined]
            if not holders:
                return False
            unused = (each for each in holders if not self._is_asked(next(iter(each.joined.values()))))
            holder = next(unused, None) or max(holders, key=lambda each: each.joined_bytes)
            oldest, of_it = next(iter(holder.joined.items()))
            if self._is_asked(of_it) and holder.joined_bytes - largest < shelf.joined_bytes + largest:
                return False
            self._forget_joined(holder, oldest)
        return True

    def _forget_joined(self, shelf: Shelf, key: Key) -> None:
        known = shelf.joined.pop(key, None)
        if known is not None and known.joined is not None:
            self._count_joined(shelf, -known.joined.bytes)
            known.joined, known.is_joined = None, False

    def _keep_to_limit(self) -> None:
        while self.bytes > self._limit_bytes:
            owner, shelf = next(iter(self._shelves.items()))
            if shelf.used >= self._step - IDLE:
                owner, shelf = max(self._shelves.items(), key=lambda each: each[1].bytes)
            oldest, of_it = next(iter(shelf.known.items()))
            self._count(shelf, -of_it.forget_oldest())
            if not of_it:
                self._forget(owner, shelf, oldest)

    def _forget(self, owner: Owner, shelf: Shelf, key: Key) -> None:
        """A prompt of which nothing is left, and its tenant with the last one."""
        self._forget_joined(shelf, key)
        del shelf.known[key]
        shelf.due.pop(key, None)
        if not shelf.due:
            self._due.pop(owner, None)
        if not shelf.known:
            del self._shelves[owner]
