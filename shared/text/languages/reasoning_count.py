"""How many tokens of a completion are reasoning."""

from collections.abc import Sequence

from shared.text.codec import TextCodec
from shared.text.languages.mark_search import search_for
from shared.text.languages.pieces import SplitPlan


class ReasoningCount:
    """Counts the tokens of one choice's reasoning, by the marks around it."""

    __slots__ = ("_again", "_inside", "_over", "_pending", "_pieces", "_split", "_text", "tokens")

    def __init__(self, split: SplitPlan, codec: TextCodec) -> None:
        form = split.written
        self._split = split
        self._pieces = codec.visible_pieces(split.marks)
        self._again = form is not None and (form.again or form.channels)
        self._inside = split.thinking == "open"
        self._over = not split.think_end or not (split.thinking or self._again)
        self._text = ""  # in which a mark may have begun
        self._pending = 0  # tokens of it
        self.tokens = 0

    def take(self, tokens: Sequence[int]) -> None:
        """Count the next tokens of the completion."""
        for token in tokens if not self._over else ():
            piece = self._pieces[token]
            self._text += piece if isinstance(piece, str) else piece.decode(errors="replace")
            self._look()
            if self._over:
                return

    def _look(self) -> None:
        mark = self._split.think_end if self._inside else self._split.think_start
        found = bool(mark) and mark in self._text
        begun = 0 if found else search_for(mark).ending(self._text)
        if self._inside:
            self.tokens += 1
        elif found:
            self.tokens += self._pending + 1
        elif not self._again and self._text.strip() and not mark.startswith(self._text.lstrip()):
            self._over = True  # it has not begun with reasoning
        self._pending = self._pending + 1 if begun else 0
        self._text = self._text[len(self._text) - begun :]
        if found:
            self._over = self._inside and not self._again
            self._inside = not self._inside
