"""How calls of tools are written: what all forms have in common, and what a reader of calls tells.

Each kind of form is one class, which reads calls letter by letter and writes the grammar by which a model must write
them. `tool_forms.py` has the forms by name.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from shared.text import grammar
from shared.text.languages.growing_text import BLANKS, GrowingText, Waiting
from shared.text.languages.values import Schemas

Mark = tuple[str, str]  # what opens calls, and what closes them; "": nothing does


class CallSink(Protocol):
    """Takes what a reader finds. A call that has begun is one, whatever follows."""

    alone: bool  # nothing but calls was said so far

    def begin(self, name: str) -> None:
        """A call of this function begins."""

    def add(self, arguments: str) -> None:
        """Add to the JSON of its arguments."""

    def end(self) -> None:
        """The arguments of the call are complete."""

    def knows(self, name: str) -> bool:
        """True if there is a function of this name."""

    def schemas(self, name: str) -> Schemas:
        """Schemas of the function's arguments by name; none for one that there is not."""


@dataclass(frozen=True)
class Signature:
    """A function as a grammar needs it: its name, and a schema that its arguments follow; None: any object."""

    name: str
    parameters: dict[str, Any] | None


@dataclass(frozen=True)
class ToolForm:
    """One form in which models write calls."""

    name: str
    marks: tuple[Mark, ...] = ()  # around calls, the family's own first; (): a call stands between words without marks
    opens: tuple[str, ...] = ()  # letters that a call without marks begins with
    bare: tuple[str, ...] = ()  # with which a call may begin whose opening mark the model has forgotten
    many: bool = False  # there may be several calls between two marks
    between: str = BLANKS  # letters that may stand around calls, within their marks
    head: str = ""  # what a model writes after the opening mark,
    joint: str = ""  # between two calls,
    foot: str = ""  # and before the closing mark
    tokens: tuple[str, ...] = ()  # within calls: decoding must not hide them
    hidden: tuple[str, ...] = ()  # marks that may stand before calls, and are not shown

    def read(self, text: GrowingText, sink: CallSink, bare: bool = False) -> Waiting[bool]:
        """Read a call; `bare`: one without the mark that should have opened it.

        False, with nothing told: it is none, and what was read of it may be read as something else.
        """
        raise NotImplementedError

    def rule(self, function: Signature, at: int, spelled: grammar.Spelling, rules: list[str]) -> str:
        """Lark for one call of a function, which is number `at`; what it refers to is added to `rules`. `spelled` makes
        Lark of a text."""
        raise NotImplementedError

    def unheld(self, parameters: dict[str, Any]) -> list[str]:
        """Places of a schema, besides those that no grammar can enforce, that this form has no rules for."""
        return []

    def closers(self, end: str) -> tuple[str, ...]:
        """Marks that may follow a call which is closed by `end`."""
        return (end,)

    @property
    def openers(self) -> tuple[str, ...]:
        """With what a call may begin in a text."""
        return (*(start for start, _ in self.marks), *self.bare, *self.opens)

    @property
    def shown(self) -> tuple[str, ...]:
        """Tokens that must be visible to be found."""
        return (*(mark for pair in self.marks for mark in pair if mark), *self.tokens, *self.hidden)
