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
from worker.engine.speculation.lookup import BREAK, Ids, Text

KEPT = 32  # latest completions of one prompt
JOINED = 64  # prompts whose completions lie in one array, ready to be looked through
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
    texts: list[tuple[Mark, Ids]]


def text_behind(prompt_ids: Sequence[int], ids: Sequence[int]) -> Ids:
    """A text to draft from that goes on after this prompt."""
    return np.array([BREAK, *prompt_ids[-ANCHOR:], *ids], np.int32)


class Memory:
    """Of one engine."""

    def __init__(self, limit_bytes: int, lengths: tuple[int, ...]) -> None:
        """`lengths`: of the runs of ids that are looked for."""
        self._limit_bytes = limit_bytes
        self._lengths = lengths
        self._texts: OrderedDict[Key, OrderedDict[Mark, Ids]] = OrderedDict()  # the latest used last
        self._joined: OrderedDict[Key, Text] = OrderedDict()  # of the prompts that were asked for last
        self.bytes = 0

    def add(self, completions: Completions) -> None:
        """What sequences have written; what is known already changes nothing."""
        key = completions.key
        texts = self._texts.setdefault(key, OrderedDict())
        self._texts.move_to_end(key)
        for mark, text in completions.texts:
            if mark in texts or text.nbytes > self._limit_bytes:
                continue
            self._joined.pop(key, None)
            texts[mark] = text
            self.bytes += text.nbytes
            if len(texts) > KEPT:
                self._forget_oldest(key)
        while self.bytes > self._limit_bytes:
            self._forget_oldest(next(iter(self._texts)))
        if not texts:
            self._texts.pop(key, None)

    def texts(self, key: Key) -> Text | None:
        """All that is kept of a prompt, the latest last; None: nothing is."""
        if key not in self._texts:
            return None
        self._texts.move_to_end(key)
        joined = self._joined.get(key)
        if joined is None:
            joined = self._joined[key] = Text(np.concatenate([*self._texts[key].values()]), self._lengths)
            if len(self._joined) > JOINED:
                self._joined.popitem(last=False)
        return joined

    def _forget_oldest(self, key: Key) -> None:
        texts = self._texts[key]
        self._joined.pop(key, None)
        self.bytes -= texts.popitem(last=False)[1].nbytes if texts else 0
        if not texts:
            del self._texts[key]
