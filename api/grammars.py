"""Checks grammars at admission: what passes here compiles in a worker.

Compiling may take a while and a large vocabulary takes a second to read, so both happen in a thread. A tokenizer is
read once, and a grammar that has passed lately is not compiled again.
"""

import asyncio
from collections import OrderedDict

from llguidance import LLTokenizer

from shared import grammar
from shared.sequences import ModelCard
from shared.text import TextCodec

KEPT = 256  # grammars that have passed


class GrammarChecker:
    """The grammars of one api process."""

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[str, int], LLTokenizer] = {}
        self._passed: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def check(self, text: str, card: ModelCard, codec: TextCodec) -> None:
        """InvalidGrammarError when the model's workers could not compile it."""
        key = (card.tokenizer_sha256, text)
        if key in self._passed:
            self._passed.move_to_end(key)
            return
        await asyncio.to_thread(self._check, text, card, codec)
        self._passed[key] = None
        if len(self._passed) > KEPT:
            self._passed.popitem(last=False)

    def _check(self, text: str, card: ModelCard, codec: TextCodec) -> None:
        key = (card.tokenizer_sha256, card.vocab_size)
        tokenizer = self._tokenizers.get(key)
        if tokenizer is None:
            tokenizer = self._tokenizers[key] = grammar.tokenizer_of(codec.bundle, card.vocab_size)
        grammar.check(text, tokenizer)
