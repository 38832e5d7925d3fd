"""KV that admitted rows may come to take, by which more are claimed and admitted: pure.

Where rows share prompts, what several begin with counts once, as the batch stores it (batch/shared_prompts.py). Which
ids prompts have in common is known before they are computed, by the keys of their blocks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shared.sequences import SequenceClass, SequenceSpec
from worker.engine.prefixes.block_keys import BlockKeys
from worker.engine.scheduler import Limits

PART = 64  # positions: of different prompts rows share multiples of so many


@dataclass(frozen=True, eq=False)
class RowTokens:
    """Positions that an admitted row may come to hold."""

    tokens: int
    shared: int = 0  # of them, those that rows of one group store once where prompts are shared
    group: Hashable = None  # None: alone
    sequence_class: SequenceClass = "interactive"
    ids: Sequence[int] = ()  # by which others store the same
    version: str = ""  # that computes its KV
    owner: str = ""  # who alone may have it; "": all

    @classmethod
    def of(cls, spec: SequenceSpec, version: str = "") -> "RowTokens":
        """Those of a sequence whose KV this version computes; the last id of a prompt is fed for each row."""
        if spec.kind != "generate":
            return cls(spec.kv_tokens, spec.kv_tokens, sequence_class=spec.sequence_class, version=version)
        length = len(spec.prompt_ids)
        group = (spec.group, length, version) if spec.group else None
        ids, owner = spec.kv_prompt, owner_of(spec)
        return cls(spec.kv_tokens, length - 1, group, spec.sequence_class, ids, version, owner)

    @property
    def prompt(self) -> Hashable:
        """Equal where rows have one prompt."""
        return self.group or self

    @cached_property
    def blocks(self) -> tuple[bytes, ...]:
        """Keys of the prompt's parts; an equal key means that all ids up to that part's end are equal."""
        return tuple(BlockKeys(self.owner, PART).chain(self.ids[: self.shared], self.version))


def owner_of(spec: SequenceSpec) -> str:
    """The group or sequence that alone may have the KV of this one's prompt; "": all may."""
    return "" if spec.cache and not spec.fresh else spec.group or spec.id


class StoredPrompts:
    """Prompts of rows where rows share them: what several begin with is stored once."""

    def __init__(self) -> None:
        self._rows: Counter[Hashable] = Counter()  # of each prompt
        self._first: dict[Hashable, RowTokens] = {}
        self._users: Counter[bytes] = Counter()  # prompts with this block
        self.positions = 0
        self._copied = 0  # positions of all rows' prompts

    def __contains__(self, prompt: Hashable) -> bool:
        return prompt in self._rows

    def add(self, row: RowTokens) -> None:
        """Count a row's prompt, as far as no other one stores it."""
        self.positions += self.more(row)
        self._copied += row.shared
        if row.prompt not in self._rows:
            self._first[row.prompt] = row
            self._users.update(row.blocks)
        self._rows[row.prompt] += 1

    def remove(self, row: RowTokens) -> None:
        """Free what no other row's prompt stores."""
        self._copied -= row.shared
        self._rows[row.prompt] -= 1
        if self._rows[row.prompt]:
            return
        del self._rows[row.prompt]
        first = self._first.pop(row.prompt)
        for block in first.blocks:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
        self.positions -= self.more(first)

    def more(self, row: RowTokens) -> int:
        """Positions that one more row adds."""
        if row.prompt in self._rows:
            return 0
        return row.shared - PART * sum(block in self._users for block in row.blocks)

    def own(self, row: RowTokens, more: Collection[bytes] = ()) -> int:
        """Positions of a row's prompt that no other prompt begins with; `more`: blocks of one that may come."""
        return row.shared - PART * bisect_left(
            row.blocks, True, key=lambda block: self._users[block] + (block in more) < 2
        )

    def are_alike(self, *more: RowTokens) -> bool:
        """True if a prompt has two rows on average, or half of all positions are stored for others.

        With fewer a step would be slow for little memory.
        """
        rows = sum(self._rows.values()) + len(more)
        if 2 * len(self._rows.keys() | {row.prompt for row in more}) <= rows:
            return True
        copied = self._copied + sum(row.shared for row in more)
        return 2 * (self.positions + sum(map(self.more, more))) <= copied


class Reserved:
    """KV of the admitted rows, as the batch holds it: each padded to the longest, at the length it may come to have.

    Where prompts are shared, what several begin with counts once (in parts of PART positions), and what rows add to it
    is padded to the longest. One prompt more of each class counts, which is computed for a row that joins later and may
    have to be a copy until then: of one class but for what it has in common with others, which it reads where it is.
    """

    def __init__(self, limits: Limits, max_rows: int, *, shares: bool = False) -> None:
        """`shares`: prompts, where more rows fit by that."""
        self._limits = limits
        self._max_rows = max_rows
        self._prompts = StoredPrompts() if shares else None
        self._rows: list[RowTokens] = []

    @property
    def bytes(self) -> int:
        """Bytes reserved for all rows."""
        return self._shared() if self.need_sharing else self._copied(self._rows)

    @property
    def least_bytes(self) -> int:
        """Bytes in the smaller of the forms that the rows may have."""
        return min(self.bytes, self._shared()) if self._prompts and self._prompts.are_alike() else self.bytes

    @property
    def need_sharing(self) -> bool:
        """True if the rows fit with shared prompts only."""
        is_full = len(self._rows) > 1 and self._copied(self._rows) > self._limits.kv_limit_bytes
        return is_full and self._prompts is not None

    def fits(self, row: RowTokens) -> bool:
        """True if one more row has a place and KV; the first row always fits."""
        if not self._rows:
            return True
        if len(self._rows) >= self._max_rows:
            return False
        limit = self._limits.kv_limit_bytes
        if self._copied([*self._rows, row]) <= limit:
            return True
        return self._prompts is not None and self._prompts.are_alike(row) and self._shared(row) <= limit

    def add(self, row: RowTokens) -> None:
        """Reserve KV for an admitted row."""
        self._rows.append(row)
        if self._prompts:
            self._prompts.add(row)

    def remove(self, row: RowTokens) -> None:
        """Free the KV reserved for a row."""
        self._rows.remove(row)
        if self._prompts:
            self._prompts.remove(row)

    def _copied(self, rows: Sequence[RowTokens]) -> int:
        return len(rows) * self._limits.reserved_bytes(max((row.tokens for row in rows), default=0))

    def _shared(self, *more: RowTokens) -> int:
        rows, prompts = [*self._rows, *more], self._prompts
        if not rows or prompts is None:
            return 0
        limits = self._limits
        longest = max(row.tokens for row in rows)
        stored = prompts.positions + sum(map(prompts.more, more))
        new = {block for row in more if row.prompt not in prompts for block in row.blocks}
        on_their_way = common = 0
        for of in {row.sequence_class for row in rows}:
            prompts_of = {row.prompt: row for row in rows if row.sequence_class == of}.values()
            longest_prompt = max(row.shared for row in prompts_of)
            on_their_way += longest_prompt
            common = max(common, longest_prompt - max(prompts.own(row, new) for row in prompts_of))
        own = limits.shared_bytes(max(row.tokens - row.shared for row in rows))
        unshared = limits.reserved_bytes(longest) - limits.shared_bytes(longest)  # states and drafts among them
        if unshared:
            common = 0  # a state belongs to one position: such a prompt is a copy
        return limits.shared_bytes(stored + on_their_way - common) + len(rows) * (own + unshared)
