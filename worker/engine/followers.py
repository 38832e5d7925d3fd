"""Rows that wait for another row's prefill, because their prompts begin alike: it is computed once.

A row whose prompt shares at least half of its blocks with one that the batch is prefilling now waits, and then starts
from the prefix cache, where the leader's KV is by then. Without the cache nobody waits.

Invariants. A row waits for one leader, once: when the leader has its first token, or has left, the row starts, cached
or not. Whoever waits is not prefilling, so nobody waits for somebody who waits.
"""

from collections.abc import Collection

from worker.engine.adapters import Adapters
from worker.engine.prefill import PrefillTask
from worker.engine.prefix_cache import PrefixCache
from worker.engine.rows import Row


class Followers:
    """Of one engine."""

    def __init__(self, prefixes: PrefixCache, adapters: Adapters) -> None:
        self._prefixes = prefixes
        self._adapters = adapters
        self._leaders: dict[Row, Row] = {}

    def add(self, task: PrefillTask, prefilling: Collection[Row]) -> bool:
        """Let a task's row wait if one of these rows computes what it needs; False when it should start."""
        (row,) = task.rows
        version = self._adapters.version(row)
        shared = self._prefixes.worth_sharing(task.ids, version)
        if not shared:
            return False
        beginning = tuple(task.ids[:shared])
        for leader in prefilling:
            if leader.spec.prompt_ids[:shared] == beginning and self._adapters.version(leader) == version:
                self._leaders[row] = leader
                return True
        return False

    def ready(self, prefilling: Collection[Row]) -> list[Row]:
        """The rows whose leader is done; they wait no longer."""
        rows = [row for row, leader in self._leaders.items() if leader not in prefilling]
        for row in rows:
            del self._leaders[row]
        return rows

    def remove(self, row: Row) -> None:
        """Forget a row."""
        self._leaders.pop(row, None)
