"""At which positions of a prompt the states of layers that cannot be cut are worth a snapshot. Pure.

A snapshot costs a forward that ends there, a copy and its bytes, so there are few:

- near the prompt's end, for the next turn. A long prompt's is on a block's boundary and a few ids before the end: a
  chat template may end a prompt with ids that are gone when the next turn is rendered (`<think>`).
- where blocks that are known end and this prompt goes on in another way: a system prompt that others share.
- now and then along a long prompt, whose end may be rendered otherwise the next time.
"""

from math import ceil

LONG = 4  # blocks; a shorter prompt has its snapshot at its very end, without a forward of its own
MARGIN = 8  # ids that a template may put at the end of a prompt, and take away
SPACING = 1024  # ids between two snapshots along a prompt, at least
SHARE = 8  # an eighth of the cache is the most that these take of one prompt


class SnapshotPositions:
    """Chooses positions for one model; `state_bytes` of a row is known once the first one is stored."""

    def __init__(self, block_size: int, limit_bytes: int) -> None:
        self._block_size = block_size
        self._limit = limit_bytes
        self.state_bytes = 0

    def of(self, length: int, past: int, shared: int) -> list[int]:
        """Positions for a prompt of `length` ids; the first `past` are not fed, and `shared` are known as blocks."""
        size = self._block_size
        fed = length - 1  # the last one is fed with the first draw
        if length < size:
            return []
        end = fed if fed < LONG * size else (fed - MARGIN) // size * size
        spacing = max(SPACING, SHARE * length * self.state_bytes // max(1, self._limit))
        spacing = ceil(spacing / size) * size
        stops = {end, *range(spacing, end - spacing // 2, spacing)}
        if shared + size < end:
            stops.add(shared)
        return sorted(stop for stop in stops if past < stop <= fed)
