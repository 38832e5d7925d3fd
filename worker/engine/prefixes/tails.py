"""Ends of short prompts that do not fill a block, so that a prompt that is sampled again is found whole.

A tail is the KV of the ids after a prompt's last whole block. It is kept where it is a good part of its prompt, and
found where the ids go on with exactly its ids, after the same blocks of the same version. Each tenant finds its own
tails only: a short prompt is easier to guess than a block is.

Invariants. Lives in the engine's thread. Tails have bytes and an order of use of their own, so they never drive out
blocks; one whose blocks have gone is not found until they are there again. They are in memory only: neither files nor
other workers get any.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from worker.engine.prefixes.slabs import Shares, SlabCut, SlabUse

WORTH = 4  # a tail is a quarter of its prompt, at least
SHARE = 8  # an eighth of the prefix cache is the most that tails take of it
ENTRY_BYTES = 1024  # that a tail's place counts for in addition to its KV: ids of a block and the tables

Place = tuple[bytes, str, tuple[int, ...]]  # key of the block before it, tenant, its ids


class Tails:
    """Ids after whole blocks, with their KV, for one prefix cache of `limit_bytes`."""

    def __init__(self, limit_bytes: int, shares: Shares = ((), ())) -> None:
        self._limit = limit_bytes // SHARE
        self._cuts: OrderedDict[Place, SlabCut] = OrderedDict()  # least recently used first
        self._lengths: dict[tuple[bytes, str], Counter[int]] = {}  # of the tails after a block, fewer than it has ids
        self._use = SlabUse(shares)

    def __len__(self) -> int:
        return len(self._cuts)

    @property
    def nbytes(self) -> int:
        """Bytes of KV that tails hold."""
        return self._use.bytes

    def takes(self, tail: int, length: int) -> bool:
        """True if a tail of `tail` ids of a prompt of `length` ids should be stored."""
        return self._limit > 0 and 0 < length <= WORTH * tail

    def has(self, place: Place) -> bool:
        return place in self._cuts

    def find(self, key: bytes, tenant: str, ids: Sequence[int]) -> Place | None:
        """The longest tail after a block with which these ids begin."""
        lengths = self._lengths.get((key, tenant), ())
        places = ((key, tenant, tuple(ids[:length])) for length in sorted(lengths, reverse=True) if length <= len(ids))
        return next((place for place in places if place in self._cuts), None)

    def use(self, place: Place) -> SlabCut:
        """The KV of a tail that is there; it is the youngest then."""
        self._cuts.move_to_end(place)
        cut = self._cuts[place] = self._use.alone(self._cuts[place])
        self._shrink()
        return cut

    def add(self, tails: Iterable[tuple[Place, SlabCut]]) -> None:
        """Keep tails that are not there, as far as there is room."""
        for place, cut in tails:
            self._use.take(cut)
            self._cuts[place] = cut
            self._lengths.setdefault(place[:2], Counter())[len(place[2])] += 1
        self._shrink()

    def clear(self) -> None:
        while self._cuts:
            self._evict()

    def _shrink(self) -> None:
        while self._cuts and self._use.bytes + ENTRY_BYTES * len(self._cuts) > self._limit:
            self._evict()

    def _evict(self) -> None:
        place, cut = self._cuts.popitem(last=False)
        self._use.release(cut)
        lengths = self._lengths[place[:2]]
        lengths[len(place[2])] -= 1
        if not lengths[len(place[2])]:
            del lengths[len(place[2])]
        if not lengths:
            del self._lengths[place[:2]]
