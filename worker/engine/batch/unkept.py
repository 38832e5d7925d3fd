"""Rows whose prompts are through, and are still to go into the prefix cache: a burst's over some steps.

The copy of 128 prompts' KV held the loop of a GPU for 88 ms. So between two decode steps about as many bytes are copied
as the engine's configuration says, and one prompt at least. A row that ends before its turn has no KV any more, and its
prompt is not kept.
"""

from collections import deque
from collections.abc import Callable, Iterable, Set

from worker.engine.batch.row import Row
from worker.engine.kv.prefix_cache import PrefixCache, Prompt
from worker.engine.kv.slabs import KvRows


class Unkept:
    """In order of their first tokens."""

    def __init__(self, bytes_per_token: int, bytes_at_once: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._bytes_at_once = bytes_at_once
        self._rows: deque[Row] = deque()

    def next(self, started: Iterable[Row]) -> dict[frozenset[str], list[Row]]:
        """After these have got their first tokens: the rows to store now, by the versions of their KV."""
        self._rows.extend(started)
        found: dict[frozenset[str], list[Row]] = {}
        left = self._bytes_at_once
        while self._rows and left > 0:
            row = self._rows.popleft()
            left -= len(row.spec.prompt_ids) * self._bytes_per_token
            found.setdefault(frozenset(row.kv_versions), []).append(row)
        return found

    def remove(self, rows: Iterable[Row]) -> None:
        """They have left, or compute their context again."""
        if self._rows:
            gone = set(rows)
            self._rows = deque(row for row in self._rows if row not in gone)


def keep(
    cache: PrefixCache,
    rows: list[Row],
    versions: Set[str],
    kv: Callable[[list[Row]], KvRows],
    length: int | None = None,
) -> None:
    """Store the KV of these rows' prompts, computed with `versions`: of `length` ids, or of all but the last."""
    if len(versions) != 1:
        return  # mixed: nobody could ask for it
    [version] = versions
    prompts = [Prompt(row.spec.prompt_ids[: -1 if length is None else length], version) for row in rows]
    lacking = [place for place, prompt in enumerate(prompts) if cache.lacks(prompt.ids, version)]
    if lacking:
        cache.store([prompts[place] for place in lacking], kv([rows[place] for place in lacking]))
