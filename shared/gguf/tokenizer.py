"""Builds tokenizer.json and its settings from a GGUF file's metadata.

Two kinds of tokenizers are known: byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`). Of the first a file names
how text is split before merging; an unknown name is refused, since another split gives other tokens in silence.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shared.errors import SetupError
from shared.gguf.file import GgufFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"})
_SPECIAL = ("bos", "eos", "unknown", "padding")
_HF_NAMES = {"unknown": "unk_token", "padding": "pad_token"}

_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_UNCASED = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED}*{_UNCASED}+|[^\r\n\p{{L}}\p{{N}}]?{_CASED}+{_UNCASED}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True)
class _Split:
    """How text is cut before its bytes are merged."""

    pattern: str = ""  # "": as GPT-2 does
    digits: bool = False  # each digit alone, first
    whole_words: bool = False  # a word of the vocabulary is its token, whatever merges would make
    begins: bool = False  # with the token that begins texts, unless the file says otherwise


_GPT2, _DIGITS = _Split(), _Split(digits=True)
_SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _Split(_LLAMA3, whole_words=True, begins=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Split(_QWEN2)),
    "tekken": _Split(_TEKKEN, whole_words=True, begins=True),
}
_UNNAMED = {"qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}  # of older files, by architecture


@dataclass(frozen=True)
class BuiltTokenizer:
    """A tokenizer as mlx-lm finds it in a folder."""

    tokenizer: Tokenizer
    settings: dict[str, Any]  # tokenizer_config.json
    eos_token_ids: list[int]


def build_tokenizer(file: GgufFile) -> BuiltTokenizer:
    """The tokenizer that a file describes; `SetupError` says what it lacks."""
    tokens = _texts(file, "tokens")
    if not tokens:
        raise SetupError(f"{file.path} has no tokenizer: tokenizer.ggml.tokens is empty or missing")
    kinds = _at(file, "token_type", [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise SetupError(f"{file.path}: {len(tokens)} tokens have {len(kinds)} kinds")
    model = _at(file, "model", "")
    if model == "gpt2":
        tokenizer, begins = _byte_level(file, tokens)
    elif model == "llama":
        tokenizer, begins = _sentencepiece(file, tokens, kinds), True
    else:
        raise SetupError(f"{file.path}: its tokenizer is of the kind {model!r}; gpt2 and llama can be converted")
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [text for text, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind]
        make = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        make([AddedToken(text, special=special, normalized=False) for text in added])
    named = _named(file, tokens)
    _add_ends(tokenizer, named, _at(file, "add_bos_token", begins), _at(file, "add_eos_token", False))
    ends = {_at(file, f"{name}_token_id", None) for name in ("eos", "eot", "eom")}
    ends |= {index for index, text in enumerate(tokens) if kinds[index] == _CONTROL and text in _ENDS}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{_HF_NAMES.get(name, f"{name}_token"): text for name, (_, text) in named.items()},
        "model_max_length": file.get("context_length", 1 << 20),
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    known = sorted(end for end in ends if isinstance(end, int) and end < len(tokens))
    return BuiltTokenizer(tokenizer, settings, known)


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether a text begins with a token of its own where the file does not say."""
    named = str(_at(file, "pre", "") or _UNNAMED.get(file.architecture, ""))
    if (split := _SPLITS.get(named)) is None:
        raise SetupError(
            f"{file.path}: its tokenizer splits text by {named or 'a rule that it does not name'!r}; known are "
            f"{', '.join(_SPLITS)}"
        )
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in _texts(file, "merges"))]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=split.whole_words))
    except Exception as error:  # of the library's own, without a class
        raise SetupError(f"{file.path}: its merges do not fit its tokens: {error}") from error
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if split.pattern == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, split.begins


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores = _at(file, "scores", [])
    if len(scores) != len(tokens):
        raise SetupError(f"{file.path}: {len(tokens)} tokens have {len(scores)} scores")
    if file.architecture.startswith("gemma"):  # whose scores are not those that pieces were merged by
        scores = [-index for index in range(len(tokens))]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    unknown = next((text for text, kind in zip(tokens, kinds, strict=True) if kind == 2), None)
    merges = _merges(tokens, kinds, scores, vocabulary)
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = _at(file, "add_space_prefix", True)
    marks: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def _merges(
    tokens: list[str], kinds: list[int], scores: list[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the best piece first, as SentencePiece would join them."""
    found = []
    for index, text in enumerate(tokens):
        if kinds[index] != _NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], index, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_ends(tokenizer: Tokenizer, named: dict[str, tuple[int, str]], begin: bool, end: bool) -> None:
    first = named.get("bos") if begin else None
    last = named.get("eos") if end else None
    if first is None and last is None:
        return
    around = [first[1]] if first else [], [last[1]] if last else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*around[0], "$A", *around[1]],
        pair=[
            *around[0],
            "$A",
            *around[1],
            *(f"{text}:1" for text in around[0]),
            "$B:1",
            *(f"{text}:1" for text in around[1]),
        ],
        special_tokens=[(text, index) for index, text in filter(None, (first, last))],
    )


def _named(file: GgufFile, tokens: list[str]) -> dict[str, tuple[int, str]]:
    """The tokens with a part of their own: id and text."""
    ids = {name: _at(file, f"{name}_token_id", None) for name in _SPECIAL}
    return {name: (index, tokens[index]) for name, index in ids.items() if index is not None and index < len(tokens)}


def _at(file: GgufFile, key: str, default: Any) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{key}", default)


def _texts(file: GgufFile, key: str) -> list[str]:
    value = _at(file, key, [])
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise SetupError(f"{file.path}: tokenizer.ggml.{key} is no list of texts")
    return value
