"""A prefix cache whose KV goes to disk when it leaves memory, and comes back while the row that wants it still waits.

Files are found by the keys of their blocks, in memory, so a look-up costs no I/O. What is longer on disk than in memory
is read in threads (tier.py) and put back as if it had been stored. A row waits for that as long as a slow disk takes,
then starts with what has come.

Invariants. As PrefixCache's. Only KV of the base and of adapter versions named lasting
(`lasting`) is written, and read only where the version's weights are those that it was computed with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from mlx_model.config import EngineConfig
from shared.sequences import ModelCard
from worker.engine.messages import DiskStats
from worker.engine.prefixes.disk.index import FileEntry
from worker.engine.prefixes.disk.tier import DiskTier
from worker.engine.prefixes.entries import NOTHING, Promotion, Segment, StateSnapshot, go_on_with
from worker.engine.prefixes.parcels import identity_of
from worker.engine.prefixes.sharing import SharedCache

log = logging.getLogger(__name__)

MOST_WAITING = 2  # half of the cache's bytes may wait to be written, besides it
PATIENCE_S = 1.0
REST_S = 30.0  # in which nothing is read, after a row has waited in vain
SLOW_DISK = 200e6  # bytes per second that a row waits for, besides
LOSS_S = 0.05  # that a row waits longer for its KV than computing it would have taken, at least, to be counted
LOSSES = 3  # one after another, and nothing is read for a while: small models on fast GPUs are quicker than disks


class _FromDisk(Promotion):
    """Entries that one row waits for."""

    def __init__(
        self, keys: list[bytes], ids: Sequence[int], version: str, at_most: int, entries: list[FileEntry]
    ) -> None:
        self.keys, self.ids, self.version, self.at_most = keys, ids, version, at_most
        self.pending = {entry.name for entry in entries}
        self.began = time.monotonic()
        self.until = self.began + PATIENCE_S + sum(entry.size for entry in entries) / SLOW_DISK
        self.known = 0  # ids that memory had before

    @property
    def waits(self) -> bool:
        return bool(self.pending) and time.monotonic() < self.until

    @property
    def came_late(self) -> bool:
        return bool(self.pending) and time.monotonic() >= self.until

    def cancel(self) -> None:
        self.pending.clear()


class TieredCache(SharedCache):
    """A prefix cache over a disk tier."""

    def __init__(
        self,
        limit_bytes: int,
        block_size: int,
        base_sha256: str,
        new_kv: Sequence[Any],
        identity: str,
        tier: DiskTier,
        *,
        through: bool,
        token_s: Callable[[], float],
    ) -> None:
        """`token_s`: what a prompt's token takes to compute (0: not known)."""
        super().__init__(limit_bytes, block_size, base_sha256, new_kv, identity)
        self._tier = tier
        self._through = through
        self._lasting: dict[str, str] = {"": ""}  # version -> digest of its weights
        self._promotions: list[_FromDisk] = []
        self._rests_until = 0.0
        self._token_s = token_s
        self._losses = 0

    @property
    def disk(self) -> DiskStats:
        """Statistics of the files on disk."""
        return self._tier.stats

    @property
    def busy(self) -> bool:
        """True if `work` has anything to do."""
        return self._tier.busy

    def last(self, versions: dict[str, str]) -> None:
        """Keep KV of these adapter versions on disk, too, and no others'; by version the digest of its weights."""
        self._lasting = {"": "", **versions}

    # -- out

    def _leaves(self, entry: Segment | StateSnapshot) -> None:
        self._offer(entry)

    def _added(self, entry: Segment | StateSnapshot) -> None:
        if self._through:
            self._offer(entry)

    def _offer(self, entry: Segment | StateSnapshot) -> None:
        weights = self._lasting.get(entry.version)
        if weights is None:
            return
        if isinstance(entry, Segment):
            self._tier.offer_blocks(entry.keys, entry.cut, entry.version, weights)
        else:
            self._tier.offer_snapshot(
                entry.key, entry.tail, entry.length, entry.state, entry.rest, entry.version, weights
            )

    def _offer_all(self) -> None:
        """Offer all entries for writing, the latest used first, so that beginnings precede what follows them."""
        for entry in reversed(self._order):
            self._offer(entry)

    # -- in

    def promotion(self, ids: Sequence[int], version: str, at_most: int) -> Promotion:
        """Bring to memory what disk has of these ids beyond that."""
        if not self._limit or at_most < self._block_size or version not in self._lasting:
            return NOTHING
        if time.monotonic() < self._rests_until:
            return NOTHING
        keys = list(self._keys.chain(ids, version))
        entries = self._on_disk(keys, ids, version, at_most)
        if not entries:
            return NOTHING
        promotion = _FromDisk(keys, ids, version, at_most, entries)
        promotion.known = self.known(ids, version, at_most)
        self._promotions.append(promotion)
        for entry in entries:
            self._tier.want(entry, lambda: promotion.waits)
        return promotion

    def _on_disk(self, keys: list[bytes], ids: Sequence[int], version: str, at_most: int) -> list[FileEntry]:
        """The files to read, in order; [] where memory has as much."""
        in_memory = sum(self._find(iter(keys)).values())
        chain = self._chain(keys, in_memory, version)  # the file of each block from there on
        if not self.needs_snapshots:
            return self._within_limit(chain[: -(-at_most // self._block_size) - in_memory])
        known = self.known(ids, version, at_most)
        for count in range(min(in_memory + len(chain), at_most // self._block_size), -1, -1):
            if (count + 1) * self._block_size <= known:
                break
            key = keys[count - 1] if count else self._keys.root(version)
            behind = [entry for entry in self._tier.index.snapshots(key) if known < entry.label.length <= at_most]
            fitting = [
                entry
                for entry in behind
                if self._is_usable(entry, version) and go_on_with(ids, entry.label.tail or (), entry.label.length)
            ]
            if not fitting:
                continue
            longest = max(fitting, key=lambda entry: entry.label.length)
            blocks = chain[: max(0, count - in_memory)]
            entries = [*dict.fromkeys(blocks), longest]
            if sum(entry.size for entry in entries) <= self._limit:
                return entries
        return []

    def _chain(self, keys: list[bytes], start: int, version: str) -> list[FileEntry]:
        chain: list[FileEntry] = []
        for key in keys[start:]:
            entry = self._tier.index.block(key)
            if entry is None or not self._is_usable(entry, version):
                break
            chain.append(entry)
        return chain

    def _is_usable(self, entry: FileEntry, version: str) -> bool:
        if entry.label.version == version and entry.label.weights == self._lasting[version]:
            return True
        self._tier.remove(entry)  # another ring's version of this name and number
        return False

    def _within_limit(self, chain: list[FileEntry]) -> list[FileEntry]:
        entries: list[FileEntry] = []
        left = self._limit
        for entry in dict.fromkeys(chain):
            left -= entry.size
            if left < 0:
                break
            entries.append(entry)
        return entries

    # -- between two steps

    def work(self) -> None:
        """Move a little between memory and disk; what goes wrong there costs no row anything."""
        try:
            self._take()
        except Exception:
            log.exception("kv.disk_tier_failed")
            self._tier.give_up()
            for promotion in self._promotions:
                promotion.cancel()
        for promotion in [each for each in self._promotions if not each.waits]:
            self._promotions.remove(promotion)
            if promotion.came_late:
                self._rests_until = time.monotonic() + REST_S
                log.warning("kv.disk_is_slow files=%d rests_s=%.0f", len(promotion.pending), REST_S)
            gained = self.known(promotion.ids, promotion.version, promotion.at_most) - promotion.known
            if gained > 0:
                self._tier.hits += 1
                self._tier.hit_tokens += gained
                self._compare(time.monotonic() - promotion.began, gained)

    def _compare(self, took_s: float, tokens: int) -> None:
        """Read no more for a while where computing is quicker."""
        token_s = self._token_s()
        lost = token_s > 0 and took_s > tokens * token_s + LOSS_S
        self._losses = self._losses + 1 if lost else 0
        if self._losses == LOSSES:
            self._losses = 0
            self._rests_until = time.monotonic() + REST_S
            log.info("kv.disk_is_slower_than_computing tokens=%d took_s=%.3f rests_s=%.0f", tokens, took_s, REST_S)

    def _take(self) -> None:
        for entry, cut, states in self._tier.work():
            wanted = [each for each in self._promotions if entry.name in each.pending]
            for promotion in wanted:
                if cut is None:
                    promotion.pending.clear()  # what comes after it is of no use
                else:
                    self.put(entry.label, promotion.keys, cut, states)
                    promotion.pending.discard(entry.name)
            self._shrink()

    def clear(self) -> None:
        """Forget everything, in files, too."""
        for promotion in self._promotions:
            promotion.cancel()
        self._tier.clear()
        super().clear()

    def close(self, *, keep: bool) -> None:
        """End; with `keep`, what is in memory is written, as far as a few seconds take us."""
        self._tier.close(self._offer_all if keep else None)


def prefix_cache(
    config: EngineConfig,
    card: ModelCard,
    new_kv: Sequence[Any],
    wake: Callable[[], None] | None,
    token_s: Callable[[], float],
    shares: Sequence[int] = (),
) -> SharedCache:
    """The prefix cache of an engine, over a disk tier where its configuration has one.

    `new_kv`: empty caches; `shares`: as in `PrefixCache`, where no ranks have files.
    """
    limit, block_size, base = config.prefix_cache_bytes, config.block_size, card.base_sha256
    identity = identity_of(base, card.dtype, block_size, new_kv)
    if config.disk is None or not limit:
        return SharedCache(limit, block_size, base, new_kv, identity, shares)
    tier = DiskTier(config.disk, base, identity, block_size, limit // MOST_WAITING, wake)
    through = config.disk.write_through
    return TieredCache(limit, block_size, base, new_kv, identity, tier, through=through, token_s=token_s)
