"""A byte-level codec without a model file: one token a byte, and two special tokens."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.text.codec import TextCodec, TokenizerBundle

EOS = 0
START = 1
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@cache
def bundle() -> TokenizerBundle:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS, "<start>": START, **{letter: i + 2 for i, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<start>"])
    return TokenizerBundle(tokenizer.to_str(), CHAT, (EOS,), {"eos_token": "<eos>"})


@cache
def codec() -> TextCodec:
    return TextCodec(bundle())


def ids(text: str) -> list[int]:
    return codec().encode(text)
