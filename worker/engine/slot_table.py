"""Which adapter version sits in which slot: pure bookkeeping with reference counts, no arrays.

A version is wanted -> loading into a slot -> loaded. Slots are numbered from 1; slot 0 is the base and never here.

Invariants. A slot that is held is never given to another version. Wanted versions get slots in order of their wish; the
least recently used slot without holds goes first. When all are held and a row waits (an urgent wish), one slot
closes: no new holds, so that it comes free; no row waits for ever after newcomers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class _Slot:
    number: int
    version: str = ""
    state: Literal["empty", "loading", "loaded"] = "empty"
    holds: int = 0
    used: int = 0  # the table's clock at the last hold or release
    closing: bool = False


class SlotTable:
    """The slots 1..count of one worker."""

    def __init__(self, count: int) -> None:
        assert count >= 1, "at least one slot"
        self._slots = [_Slot(number) for number in range(1, count + 1)]
        self._at: dict[str, _Slot] = {}  # loading and loaded versions
        self._wanted: dict[str, bool] = {}  # version -> urgent, in order of the wish
        self._clock = 0

    def is_loaded(self, version: str) -> bool:
        """True if the version's weights are in a slot."""
        slot = self._at.get(version)
        return slot is not None and slot.state == "loaded"

    def is_open(self, version: str) -> bool:
        """True if `hold` may be called for the version."""
        slot = self._at.get(version)
        return slot is not None and slot.state == "loaded" and not slot.closing

    def loaded(self) -> dict[str, int]:
        """Number of holds by loaded version."""
        return {slot.version: slot.holds for slot in self._slots if slot.state == "loaded"}

    def has_empty(self) -> bool:
        """True if more slots are empty than versions wait for one."""
        return sum(slot.state == "empty" for slot in self._slots) > len(self._wanted)

    def holds(self, version: str) -> int:
        """How often a version is held."""
        slot = self._at.get(version)
        return 0 if slot is None else slot.holds

    def slot_of(self, version: str) -> int:
        """The slot of a loaded version."""
        return self._at[version].number

    def hold(self, version: str) -> int:
        """Keep a loaded version in its slot, which is returned."""
        slot = self._at[version]
        assert slot.state == "loaded", "only a loaded version is held"
        slot.holds += 1
        self._touch(slot)
        return slot.number

    def release(self, version: str) -> None:
        """Undo one `hold` of a version."""
        slot = self._at[version]
        assert slot.holds > 0, "released more often than held"
        slot.holds -= 1
        self._touch(slot)

    def want(self, version: str, *, urgent: bool) -> None:
        """Ask for a slot, unless it has one."""
        slot = self._at.get(version)
        if slot is None or slot.closing:
            self._wanted[version] = urgent or self._wanted.get(version, False)

    def unwant(self, version: str) -> None:
        """Undo a `want` of a version."""
        self._wanted.pop(version, None)

    def next_load(self) -> tuple[str, int] | None:
        """The next wish that can have a slot now, and the slot: it counts as loading from here on."""
        for version in list(self._wanted):
            slot = self._at.get(version)
            if slot is not None:
                self._reopen(slot)
                continue
            slot = self._free_slot()
            if slot is not None:
                del self._wanted[version]
                self._put(slot, version)
                return version, slot.number
        self._close_for_urgent()
        return None

    def finish_load(self, version: str) -> None:
        """Mark a version's slot as loaded."""
        slot = self._at[version]
        assert slot.state == "loading"
        slot.state = "loaded"
        self._touch(slot)

    def fail_load(self, version: str) -> None:
        """The slot is empty again, whatever was written into it."""
        slot = self._at.pop(version)
        assert slot.state == "loading"
        slot.state, slot.version = "empty", ""

    def _reopen(self, slot: _Slot) -> None:
        """A closing version is wanted again: it stays where it is once no other version needs a slot before it."""
        if next(iter(self._wanted)) == slot.version:
            slot.closing = False
            del self._wanted[slot.version]

    def _free_slot(self) -> _Slot | None:
        free = [slot for slot in self._slots if slot.holds == 0 and slot.state != "loading"]
        return min(free, key=lambda slot: (slot.state != "empty", slot.used), default=None)

    def _put(self, slot: _Slot, version: str) -> None:
        self._at.pop(slot.version, None)
        slot.version, slot.state, slot.closing = version, "loading", False
        self._at[version] = slot

    def _close_for_urgent(self) -> None:
        """Close as many slots as there are urgent wishes; those with the fewest holds first."""
        urgent = sum(self._wanted.values())
        closing = sum(slot.closing for slot in self._slots)
        held = [slot for slot in self._slots if slot.holds > 0 and not slot.closing]
        held.sort(key=lambda slot: (slot.holds, slot.used))
        for slot in held[: max(0, urgent - closing)]:
            slot.closing = True

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.used = self._clock
