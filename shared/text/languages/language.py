"""The language of one model, whose tokenizer is at hand."""

from functools import lru_cache

from shared.text.codec import TextCodec
from shared.text.languages.families import Language, recognised


@lru_cache(maxsize=16)  # models
def language_of(codec: TextCodec) -> Language:
    """The language of a model, by its chat template and vocabulary, and by the formats that its worker was given."""
    bundle = codec.bundle

    def has(token: str) -> bool:
        return codec.added_token(token) is not None

    return recognised(bundle.chat_template, has, bundle.tool_format, bundle.reasoning_format)
