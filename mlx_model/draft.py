"""A second, smaller model that drafts for the first: what is known of it, and whether it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from mlx_model.config import DraftKv
from mlx_model.kv.kinds import are_cut, leaves
from mlx_model.kv.layout import KvLayout
from shared.errors import SetupError
from shared.text.codec import TokenizerBundle


@dataclass(frozen=True)
class DraftModel:
    """A draft model in memory with the model that it drafts for."""

    name: str
    model: Any  # the mlx-lm module
    vocab_size: int  # of its logits, which may be padded in another way than the model's
    context_length: int  # ids that it reads of a row, at most
    kv_bytes_per_token: int
    kv: KvLayout

    @property
    def kept(self) -> DraftKv:
        """KV that the draft model stores of a row."""
        return DraftKv(self.kv_bytes_per_token, self.context_length)

    def check(self) -> None:
        """SetupError if its rows cannot forget what was drafted in vain."""
        caches = self.kv.new(self.model)
        if not are_cut(caches):
            odd = sorted({type(leaf).__name__ for leaf in leaves(caches)} - {"KVCache"})
            raise SetupError(
                f"the draft model keeps its KV in mlx-lm's {', '.join(odd)}, which cannot forget refused drafts; "
                "take one whose layers keep the keys and values of every position"
            )


def check_tokenizer(model: TokenizerBundle, draft: TokenizerBundle) -> None:
    """SetupError that names the first difference, unless the same ids mean the same."""
    known = [Tokenizer.from_str(each.tokenizer_json) for each in (model, draft)]
    texts, theirs = ({id_: text for text, id_ in each.get_vocab().items()} for each in known)
    special, their_special = (
        {id_: token.content for id_, token in each.get_added_tokens_decoder().items() if token.special}
        for each in known
    )
    for what, ours, others in (
        ("token", texts, theirs),
        ("special token", special, their_special),
        ("name", model.special_tokens, draft.special_tokens),
    ):
        if difference := _first_difference(ours, others):
            raise SetupError(
                f"the draft model has another tokenizer than the model: {what} {difference}; take a draft model of "
                "the same family"
            )


def _first_difference(ours: Mapping[Any, str], theirs: Mapping[Any, str]) -> str:
    if ours == theirs:
        return ""
    key = next(key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key))
    of_model, of_draft = (repr(each[key]) if key in each else "nothing" for each in (ours, theirs))
    return f"{key} is {of_model} in the model and {of_draft} in the draft model"
