"""What sequences have written, by their prompts: another one of the same prompt may write the same.

The same prompts are sampled again and again: by a trainer's epochs, by the samples of a group, by a request that is
asked for once more. Adapter versions do not matter here, since a draft is only ever a guess.

Invariants. Completions are kept by tenant: nobody's text is drafted for anybody else, nor shows in how soon somebody
else's tokens come. What is kept is bounded in bytes; the prompts that were asked for longest ago go first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from worker.engine.speculation.lookup import BREAK, Ids, Text

KEPT = 32  # latest completions of one prompt
JOINED = 64  # prompts whose completions lie in one array, ready to be looked through
ANCHOR = 32  # ids of the prompt's end before each, by which its beginning is found

Key = tuple[str, bytes]  # tenant, hash of the prompt


def key_of(tenant: str, prompt_ids: Sequence[int]) -> Key:
    """Where completions of a prompt are kept."""
    return tenant, hashlib.blake2b(np.array(prompt_ids, np.int32).tobytes(), digest_size=16).digest()


def text_behind(prompt_ids: Sequence[int], ids: Sequence[int]) -> Ids:
    """A text to draft from that goes on after this prompt."""
    return np.array([BREAK, *prompt_ids[-ANCHOR:], *ids], np.int32)


class Memory:
    """Of one engine."""

    def __init__(self, limit_bytes: int, lengths: tuple[int, ...]) -> None:
        """`lengths`: of the runs of ids that are looked for."""
        self._limit_bytes = limit_bytes
        self._lengths = lengths
        self._texts: OrderedDict[Key, deque[Ids]] = OrderedDict()  # the latest used last
        self._joined: OrderedDict[Key, Text] = OrderedDict()  # of the prompts that were asked for last
        self.bytes = 0

    def add(self, key: Key, text: Ids) -> None:
        """What one sequence has written."""
        if text.nbytes > self._limit_bytes:
            return
        texts = self._texts.setdefault(key, deque())
        self._texts.move_to_end(key)
        self._joined.pop(key, None)
        texts.append(text)
        self.bytes += text.nbytes
        if len(texts) > KEPT:
            self.bytes -= texts.popleft().nbytes
        while self.bytes > self._limit_bytes:
            oldest = next(iter(self._texts))
            self._joined.pop(oldest, None)
            self.bytes -= self._texts[oldest].popleft().nbytes
            if not self._texts[oldest]:
                del self._texts[oldest]

    def texts(self, key: Key) -> Text | None:
        """All that is kept of a prompt, the latest last; None: nothing is."""
        if key not in self._texts:
            return None
        self._texts.move_to_end(key)
        joined = self._joined.get(key)
        if joined is None:
            joined = self._joined[key] = Text(np.concatenate(self._texts[key]), self._lengths)
            if len(self._joined) > JOINED:
                self._joined.popitem(last=False)
        return joined
