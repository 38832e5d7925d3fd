"""What sequences have written, by their prompts: another one of the same prompt may write the same.

The same prompts are sampled again and again: by a trainer's epochs, by the samples of a group, by a request that is
asked for once more. Adapter versions do not matter here, since a draft is only ever a guess.

Other workers of the ring have written some of it (worker/ring_memory.py).

Invariants. Completions are kept by tenant: nobody's text is drafted for anybody else, nor shows in how soon somebody
else's tokens come. What is kept is bounded in bytes; the prompts that were asked for longest ago go first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.sequences import SequenceSpec
from worker.engine.speculation.lookup import BREAK, Beginnings, Ids, Text

KEPT = 32  # latest completions of one prompt
COMPLETION_BYTES = 1_200  # beside its ids, what is kept of its prompt included
JOINED = 64  # prompts whose completions lie in one array, and their beginnings counted, ready to be looked through
FARTHEST = 1 << 14  # ids, the latest ones, that are looked through
MARK_BYTES = 8
ANCHOR = 32  # ids of the prompt's end before each, by which its beginning is found

Key = bytes  # digest of model, tenant and prompt
Mark = bytes  # of a sequence, so that what it has written is kept once


def key_of(spec: SequenceSpec) -> Key:
    """Where completions of a sequence's prompt are kept; those of another tenant, or model, are kept elsewhere."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (spec.model.encode(), spec.tenant.encode()):
        digest.update(b"%d:%s" % (len(name), name))
    digest.update(np.array(spec.prompt_ids, np.int32).tobytes())
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


class Known:
    """All that is kept of one prompt."""

    def __init__(self, prompt_ids: Sequence[int], lengths: tuple[int, ...]) -> None:
        self._anchor = text_behind(prompt_ids, ())
        self._lengths = lengths
        self._texts: OrderedDict[Mark, Ids] = OrderedDict()  # the latest last
        self._joined: Text | None = None
        self._beginnings: Beginnings | None = None

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, mark: Mark) -> bool:
        return mark in self._texts

    def add(self, mark: Mark, ids: Ids) -> None:
        """One more completion."""
        self._texts[mark], self._joined = ids, None
        if self._beginnings is not None:
            self._beginnings.add(ids)

    def forget_oldest(self) -> int:
        """The bytes that this has freed."""
        _, ids = self._texts.popitem(last=False)
        self._joined = None
        if self._beginnings is not None:
            self._beginnings.remove(ids)
        return bytes_of(ids)

    def forget_joined(self) -> None:
        """What is made again when it is asked for."""
        self._joined = self._beginnings = None

    @property
    def beginnings(self) -> Beginnings:
        """What completions begin with."""
        if self._beginnings is None:
            self._beginnings = Beginnings()
            for ids in self._texts.values():
                self._beginnings.add(ids)
        return self._beginnings

    @property
    def text(self) -> Text:
        """The latest `FARTHEST` ids, each completion behind the prompt's end."""
        if self._joined is None:
            parts: list[Ids] = []
            left = FARTHEST
            for ids in reversed(self._texts.values()):
                parts += [ids[-left:], self._anchor]
                left -= len(ids) + len(self._anchor)
                if left <= 0:
                    break
            self._joined = Text(np.concatenate(parts[::-1])[-FARTHEST:], self._lengths)
        return self._joined


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
        self._joined: OrderedDict[Key, None] = OrderedDict()  # prompts that were asked for last
        self.bytes = 0

    def add(self, completions: Completions) -> None:
        """What sequences have written; what is known already changes nothing."""
        key = completions.key
        known = self._known.setdefault(key, Known(completions.prompt_ids, self._lengths))
        self._known.move_to_end(key)
        for mark, ids in completions.texts:
            if mark in known or bytes_of(ids) > self._limit_bytes:
                continue
            known.add(mark, ids)
            self.bytes += bytes_of(ids)
            if len(known) > KEPT:
                self.bytes -= known.forget_oldest()
        while self.bytes > self._limit_bytes:
            oldest, of_it = next(iter(self._known.items()))
            self.bytes -= of_it.forget_oldest()
            if not of_it:
                del self._known[oldest]
        if not known:
            self._known.pop(key, None)

    def known(self, key: Key) -> Known | None:
        """All that is kept of a prompt; None: nothing is."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._joined[key] = None
            self._joined.move_to_end(key)
            if len(self._joined) > JOINED:
                oldest, _ = self._joined.popitem(last=False)
                if oldest in self._known:
                    self._known[oldest].forget_joined()
        return known
