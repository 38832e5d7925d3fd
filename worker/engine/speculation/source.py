"""What is known of one row: the texts that it may go on along, and how its drafts have held."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from worker.engine.batch.row import Row
from worker.engine.speculation.alignment import Course
from worker.engine.speculation.lookup import History, Text
from worker.engine.speculation.memory import Joined, Key
from worker.engine.speculation.payoff import Chance


@dataclass
class Source:
    """Of one row."""

    history: History
    told: int  # of its tokens, those in `history`
    chance: Chance
    prediction: Text | None  # of its client
    key: Key | None  # of what others have written behind its prompt; None: that is not kept
    joined: Joined | None = None  # that, as far as it is ready in this step
    rests: bool = False  # in this step
    is_predicted: bool = False  # its draft is from there
    by_model: bool = False  # its draft is of the draft model
    prompt: int = 0  # ids of it in `history`
    likely: float = 0.0  # chance of a token of its draft, on average
    own: Course = field(default_factory=lambda: Course(is_own=True))
    predicted: Course = field(default_factory=Course)
    kept: Course = field(default_factory=Course)  # with what others have written

    def add(self, ids: list[int]) -> None:
        """The row has gone on with these."""
        self.history.add(ids)
        for each in (self.own, self.predicted, self.kept):
            if each.is_anywhere:
                each.follow(ids, self.history)
        self.told += len(ids)

    @property
    def written(self) -> int:
        """Ids behind the prompt."""
        return len(self.history) - self.prompt


def pace(row: Row, source: Source | None = None) -> float:
    """Tokens of a step that checks drafts, lately; of a row for whose tokens nobody waits only the sum counts."""
    if row.spec.sequence_class != "interactive":
        return math.inf
    return 1.0 if source is None else source.chance.pace


def up_to_stop(row: Row, draft: list[int]) -> list[int]:
    """Without the token that ends the row: what is drawn behind a draft comes with it in any case."""
    if not row.stop_ids or row.stop_ids.isdisjoint(draft):
        return draft
    return next((draft[:at] for at, id_ in enumerate(draft) if id_ in row.stop_ids), draft)
