"""Which rows of a batch store the beginning of their KV once, and whether the batch does so at all.

Rows whose prompts are equal, or begin alike, and were computed with one version may share what is equal. A step then
reads it once, in more operations. So a batch changes to this form and back when rows join: where it is asked for, where
nothing else fits the memory (`is_needed`), or where it spares enough positions for steps to be no slower. What several
prompts begin with, such as a system prompt, is a beginning of its own, before that of each.

Invariants. What of a row is shared is set when it joins and stays until the batch changes its form, but may be divided
into more beginnings; what computed its prompt stays, for what it writes may have other versions. While memory needs the
form, each row shares its whole prompt but for the last id, and what prompts have in common is stored once in multiples
of PART, as admission counts (`reserved.Reserved`). Decisions depend on rows only, so all ranks take the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_model.device import on_cpu, on_cuda
from mlx_model.kv.kinds import begun, divide, end_of, have_beginnings, shared, whole
from mlx_model.kv.shared import Form
from shared.process.worker_settings import SharePrompts
from worker.engine.batch.prompt_group import PromptGroup
from worker.engine.batch.row import Row
from worker.engine.reserved import PART, owner_of

# Bytes of KV in a layer that a step must spare for each beginning, or it takes longer than over copies. On a CPU
# (2 cores, fp32) steps take 1.1 to 1.3 of the time where 1.1 MB are spared, 1.0 at 2.8 and 0.8 at 4.5 MB. On an H200,
# of 8 heads of 128 in bfloat16, 32 rows over 8,192 positions spare 1.1 GB and take 0.8 of the time; over 2,048 they
# spare 0.27 GB and take twice as long. Where a kernel reads beginnings it is 0.65 and 0.87; 65 MB: 0.99, and 8 groups
# that spare 33 MB each: 0.89.
LEAST_ON_CPU, LEAST_ON_CUDA, LEAST_IN_PLACE = 3 << 20, 800 << 20, 32 << 20
STAYS = 2  # times as much that a batch must spare to take the form than to stay in it: to change copies all KV


@dataclass(frozen=True, eq=False)
class Beginning:
    """Ids that rows begin with. Their last positions are stored together, those before as other beginnings."""

    ids: tuple[int, ...]
    computed: Hashable  # by what, and whose it is if no others may have it; None: no other row has it

    def common(self, ids: tuple[int, ...]) -> int:
        """First ids that are the same, in whole parts."""
        most = min(len(self.ids), len(ids)) // PART * PART
        return next((at for at in range(0, most, PART) if self.ids[at : at + PART] != ids[at : at + PART]), most)

    def begins(self, ids: tuple[int, ...]) -> bool:
        """True if these ids begin with it."""
        count = len(self.ids)
        return count <= len(ids) and self.ids[-1] == ids[count - 1] and self.ids == ids[:count]


Chain = tuple[Beginning, ...]  # each begins the next one
Plan = dict[Row, Chain]  # (): a prompt of one id


class SharedPrompts:
    """Beginnings of the rows of one batch. `layer_bytes`: KV of a position in one layer."""

    def __init__(
        self,
        when: SharePrompts,
        layer_bytes: int = 0,
        form: Form | None = None,
        is_in_place: Callable[[], bool] = lambda: False,
    ) -> None:
        """`form`: in which the model's layers read beginnings; None: in none. `is_in_place`: a kernel does, by now."""
        self._when, self._form = when if form else "off", form or "keys"
        self._layer_bytes, self._is_in_place = layer_bytes, is_in_place
        self.is_needed = False  # copies of all rows would not fit the memory
        self._of: Plan = {}  # of the batch's rows, while beginnings lie apart
        self._computed: dict[Row, Hashable] = {}  # what each row's prompt was computed by; None: shared with no others

    @property
    def _is_asked(self) -> bool:
        """True if rows share whatever it takes."""
        return self._when == "always" or (self.is_needed and self.may_be)

    @property
    def _least(self) -> int:
        """Positions that a step must spare for each beginning; 0: not measured on this device."""
        if not (on_cpu() or on_cuda()):
            return 0
        least = LEAST_ON_CPU if on_cpu() else LEAST_IN_PLACE if self._is_in_place() else LEAST_ON_CUDA
        return -(-least // max(1, self._layer_bytes))

    @property
    def may_be(self) -> bool:
        """True if rows may share prompts at all."""
        return self._when != "off"

    def spared(self, rows: Collection[Row]) -> int:
        """Positions that are not stored because these rows, which are all of the batch, share beginnings."""
        return max(0, _spared(rows, self._of)) if self._of and rows else 0

    def pays(self, rows: Sequence[Row]) -> bool:
        """True if these rows together should share what they begin with."""
        return self._plan(rows) is not None

    def begun(
        self, cache: Sequence[Any], rows: Sequence[Row], row: Row, version: str, kv: Sequence[Any]
    ) -> tuple[list[Any], int] | None:
        """KV of a new prompt that reads what it has in common with `rows` where the batch stores it, and its length.

        `kv`: of one row, what there is of the prompt otherwise. None: nothing is in common, or need not be.
        """
        if not (self._of and self._is_asked and rows):
            return None
        ids, computed = tuple(row.prompt[:-1]), (version, owner_of(row.spec))
        chain, divided = _in_common(self._of, self._known(self._of, computed), ids, computed)
        if not chain:
            return None
        if divided:
            self._of |= divided
            divide(cache[:-1], [_parts(self._of[each]) for each in rows])
        made = begun(cache[:-1], _parts(chain), kv)
        return None if made is None else (made, max(len(chain[-1].ids), end_of(kv)))

    def join(
        self, cache: list[Any], padding: list[int], rows: Sequence[Row], group: PromptGroup
    ) -> tuple[list[Any], list[int]]:
        """Before a group joins `rows`: bring the batch's KV and the group's to one form; the batch's, and its padding.

        The rows stay where they are.
        """
        if have_beginnings(group.cache[:-1]):
            caches, group.padding = whole(group.cache[:-1], range(len(group.rows)), group.padding)
            group.cache = [*caches, group.cache[-1]]
        together = object() if group.is_one_prompt else None
        self._computed |= {row: _computed_by(row, together) for row in group.rows}
        plan = self._plan([*rows, *group.rows])
        if self._of and (plan is None or any(plan[row][-1:] != self._of[row][-1:] for row in rows)):
            caches, padding = whole(cache[:-1], range(len(rows)), padding)
            cache, self._of = [*caches, cache[-1]], {}
        if plan is None:
            return cache, padding
        if rows and not self._of:
            cache, padding = self._apart(cache, padding, rows, plan)
        elif any(plan[row] != self._of[row] for row in rows):
            divide(cache[:-1], [_parts(plan[row]) for row in rows])
        group.cache, group.padding = self._apart(group.cache, group.padding, group.rows, plan)
        self._of = plan
        return cache, padding

    def leave(self, gone: Iterable[Row]) -> None:
        """Rows have left the batch."""
        for row in gone:
            self._of.pop(row, None)
            self._computed.pop(row, None)

    def clear(self) -> None:
        """The batch has been given up."""
        self._of, self._computed = {}, {}

    def _plan(self, rows: Sequence[Row]) -> Plan | None:
        """Beginnings of these rows, the batch's among them; None: each should have a copy."""
        asked = self._is_asked
        if not rows or not (asked or (self._when == "auto" and self._least)):
            return None
        if not asked and len(rows) * max(map(_end, rows)) < 2 * self._least:
            return None
        plan = {} if self.is_needed and not _are_whole(self._of) else dict(self._of)
        alike = Counter(tuple(row.prompt) for row in rows if row not in plan)
        for row in rows:
            if row not in plan:
                plan |= self._with(plan, row, alone=alike[tuple(row.prompt)] == 1)
        if asked:
            return plan
        ends = {chain[-1:] for chain in plan.values()}
        stored = {part for chain in plan.values() for part in chain}
        least = len(stored) * self._least * (1 if self._of else STAYS)
        return plan if 2 * len(ends) <= len(rows) and _spared(rows, plan) >= least else None

    def _with(self, plan: Plan, row: Row, *, alone: bool) -> Plan:
        """The beginnings of a row, and of those whose beginnings it divides.

        Those of another row, if they have as much or half of all; else all of its prompt, or what the prefix cache had
        of it, after what it has in common with others.
        """
        ids = tuple(row.prompt[:-1])
        if not ids:
            return {row: ()}
        by = self._computed[row] if row in self._computed else _computed_by(row)
        computed = None if by is None else (by, owner_of(row.spec))
        is_whole = self.is_needed or bool(row.spec.group) or not (alone and row.cached_tokens)
        length = len(ids) if is_whole else min(len(ids), row.cached_tokens)
        least = length if self.is_needed or not is_whole else len(ids) // 2 if not row.spec.group else length
        known = self._known(plan, computed)
        fitting = [chain for chain in known if len(chain[-1].ids) >= least and chain[-1].begins(ids)]
        if fitting:
            return {row: max(fitting, key=lambda chain: len(chain[-1].ids))}
        new = Beginning(ids[:length], computed)
        before, divided = _in_common(plan, known, new.ids, computed)
        is_all = bool(before) and len(before[-1].ids) == length
        return divided | {row: before if is_all else (*before, new)}

    @staticmethod
    def _known(plan: Plan, computed: Hashable) -> list[Chain]:
        """Chains of a plan that were computed by this."""
        if computed is None:
            return []
        return [chain for chain in dict.fromkeys(plan.values()) if chain and chain[-1].computed == computed]

    def _apart(
        self, cache: Sequence[Any], padding: Sequence[int], rows: Sequence[Row], plan: Plan
    ) -> tuple[list[Any], list[int]]:
        caches, after = shared(cache[:-1], [_parts(plan[row]) for row in rows], padding, self._form)
        return [*caches, cache[-1]], after


def _in_common(plan: Plan, known: Sequence[Chain], ids: tuple[int, ...], computed: Hashable) -> tuple[Chain, Plan]:
    """The longest beginning of these ids that a known chain has, and the chains that are divided for it."""
    other = max(known, key=lambda chain: chain[-1].common(ids), default=())
    common = other[-1].common(ids) if other else 0
    before = tuple(part for part in other if len(part.ids) <= common)
    if not common or (before and len(before[-1].ids) == common):
        return before if common else (), {}
    at, middle = len(before), Beginning(ids[:common], computed)
    divided = {of: (*chain[:at], middle, *chain[at:]) for of, chain in plan.items() if other[at] in chain}
    return (*before, middle), divided


def _computed_by(row: Row, together: Hashable = None) -> Hashable:
    """The version of its KV; of several, what is the same of all rows that were computed as one, if they were."""
    return next(iter(row.kv_versions)) if len(row.kv_versions) == 1 else together


def _end(row: Row) -> int:
    """Positions that a row has come to."""
    return len(row.prompt) + row.position


def _are_whole(plan: Plan) -> bool:
    return all(not chain or len(chain[-1].ids) == len(row.prompt) - 1 for row, chain in plan.items())


def _parts(chain: Chain) -> list[tuple[Beginning, int]]:
    """Each with the positions that are stored for it."""
    before = (0, *(len(part.ids) for part in chain))
    return [(part, len(part.ids) - start) for part, start in zip(chain, before, strict=False)]


def _spared(rows: Collection[Row], plan: Plan) -> int:
    """Positions of a batch of copies that one with these beginnings does not have; either pads to the longest."""
    own = max(_end(row) - (len(plan[row][-1].ids) if plan[row] else 0) for row in rows)
    stored = {part: length for row in rows for part, length in _parts(plan[row])}
    return len(rows) * (max(map(_end, rows)) - own) - sum(stored.values())
