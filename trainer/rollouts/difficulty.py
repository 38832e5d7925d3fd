"""The difficulty that a line of a data set gives its task.

Difficulties are only compared, never added (task_places.py), so levels, ages and 0-to-100 estimates need no settings of
their own. No numpy: `--help` and the process of a user's own environment load this, and nothing of places.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class DifficultyField:
    """Field of a data set's line that has the task's difficulty: a number, or one of some levels, the easiest first."""

    name: str = "difficulty"
    levels: tuple[str, ...] = ()

    def read(self, line: Mapping[str, Any]) -> float:
        """The line's difficulty; ValueError when it has none. The field may also stand in its `metadata`."""
        metadata = line.get("metadata")
        value = line.get(self.name)
        if value is None and isinstance(metadata, dict):
            value = metadata.get(self.name)
        if value is None:
            raise ValueError(f"there is no `{self.name}`, which --curriculum difficulty goes by (--curriculum-field)")
        if self.levels:
            if str(value) not in self.levels:
                raise ValueError(
                    f"`{self.name}` is {value!r:.80}, none of --curriculum-levels {', '.join(self.levels)}"
                )
            return float(self.levels.index(str(value)))
        if not is_number(value):
            raise ValueError(
                f"`{self.name}` is {value!r:.80}, not a number: name the levels, the easiest first, with "
                "--curriculum-levels"
            )
        return float(value)


def is_number(value: object) -> bool:
    """True if the value is a finite real number, so that difficulties can be compared."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False
