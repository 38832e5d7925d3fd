"""Grammars that a completion must follow, as llguidance writes them: text that travels in `SamplingParams.grammar`.

The api builds and checks one at admission, with the tokenizer of the served model; the worker's engine compiles it and
masks the logits with it. Nothing here touches MLX.

Invariants. A grammar that `check` lets pass compiles in the worker. The end-of-sequence tokens are allowed exactly
where the text may end.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from shared.errors import InvalidGrammarError
from shared.text.codec import TextCodec, TokenizerBundle

# Between JSON's tokens: what pretty printers write, and no more, or a weak model writes blanks until max_tokens.
WHITESPACE = r"(\x20|\r?\n(\x20{0,32}|\t{0,8}))?"

_EXCERPT = re.compile(r"\n +\d+ \| ")  # of a grammar, in llguidance's errors

DIGITS, BREAK = "\0", "\1"  # in texts that `Spelling` makes Lark of

MAX_CHARS = 1 << 18  # of a grammar, which travels with every choice of a request
MAX_DEPTH = 128  # of a schema
MAX_PATTERNS = 64  # `patternProperties` in a schema


def of_schema(schema: dict[str, Any] | bool, *, whitespace: str = WHITESPACE, any_whitespace: bool = True) -> str:
    """JSON that a JSON schema describes; keywords that cannot be enforced are refused by `check`."""
    if schema is False:
        raise InvalidGrammarError("the schema `false` allows nothing")
    check_size(schema)
    text = json.dumps({} if schema is True else schema)
    if not any_whitespace:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": whitespace})


def schema_of(value: "dict[str, Any] | bool | str") -> dict[str, Any] | bool:
    """A schema that may have come as JSON text; InvalidGrammarError when that is no schema."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except ValueError as error:
        raise InvalidGrammarError(f"the schema is not JSON: {error}") from error
    except RecursionError:
        raise InvalidGrammarError("the schema is nested too deep") from None
    if not isinstance(schema, dict | bool):
        raise InvalidGrammarError("a JSON schema is an object")
    return schema


def check_size(schema: dict[str, Any] | bool) -> None:
    """InvalidGrammarError for a schema that is too deep, or has more patterns of names than can be told apart in
    reasonable time: all pairs of them are tried.
    """
    found = 0
    left: list[tuple[Any, int]] = [(schema, 1)]
    while left:
        part, depth = left.pop()
        if depth > MAX_DEPTH:
            raise InvalidGrammarError(f"the schema is nested deeper than {MAX_DEPTH} levels")
        if isinstance(part, dict):
            named = part.get("patternProperties")
            found += len(named) if isinstance(named, dict) else 0
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        left += [(each, depth + 1) for each in parts]
    if found > MAX_PATTERNS:
        raise InvalidGrammarError(f"the schema has {found} 'patternProperties', and {MAX_PATTERNS} is the limit")


# Keywords without rules in llguidance. A schema that has one is refused, unless its user accepts that: `enforceable`.
_UNENFORCED = frozenset(
    {
        "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies",
        "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames",
        "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    }
)  # fmt: skip
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
_NO_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9bB]")  # look-around, references back, borders of words
_NAMED_PARTS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_PARTS = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf"})


def enforceable(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A JSON schema without the keywords that no grammar can enforce, and their places in it."""
    check_size(schema)
    places: list[str] = []

    def kept(part: Any, place: str) -> Any:
        if isinstance(part, list):
            return [kept(each, f"{place}{at}.") for at, each in enumerate(part)]
        if not isinstance(part, dict):
            return part
        shown = {}
        for name, value in part.items():
            if _is_unenforced(name, part):
                places.append(place + name)
            elif name in _NAMED_PARTS and isinstance(value, dict):
                shown[name] = {each: kept(value[each], f"{place}{name}.{each}.") for each in value}
            else:
                shown[name] = kept(value, f"{place}{name}.") if name in _PARTS else value
        return shown

    return kept(schema, ""), places


def _is_unenforced(name: str, schema: dict[str, Any]) -> bool:
    value = schema[name]
    if name in ("minProperties", "maxProperties"):
        named, required = schema.get("properties") or {}, schema.get("required") or ()
        return not all(each in required for each in named)
    if name == "format" and "string" in schema.get("type", "string"):
        return value not in _FORMATS
    if name == "pattern" and isinstance(value, str):
        return _NO_PATTERN.search(value) is not None
    return name in _UNENFORCED


def of_object() -> str:
    """Grammar of any JSON object."""
    return of_schema({"type": "object"})


def of_regex(regex: str) -> str:
    """Text that the whole of a regular expression (Rust's syntax, without look-around) matches."""
    return LLMatcher.grammar_from_regex(regex)


def of_choice(choices: Sequence[str]) -> str:
    """Grammar of exactly one of these texts."""
    return of_lark("start: " + " | ".join(map(literal, choices)))


def of_lark(lark: str) -> str:
    """A grammar in llguidance's dialect of Lark."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def compose(lark: str, parts: dict[str, str]) -> str:
    """A Lark grammar that refers to other grammars as `@name`, to each once, before anything that a user has written.

    Those may be composed, too: each gets a name of its own in the whole.
    """
    named: list[dict[str, Any]] = []
    for name, text in parts.items():
        first, *others = json.loads(text)["grammars"]
        unique = f"{name}_{len(others)}_{len(named)}"
        lark = lark.replace(f"@{name}", f"@{unique}", 1)
        named += [{**first, "name": unique}, *others]
    return json.dumps({"grammars": [{"name": "whole", "lark_grammar": lark}, *named]})


def inline_schema(schema: dict[str, Any]) -> str:
    """A JSON schema inside a Lark grammar."""
    check_size(schema)
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


class Spelling:
    """Lark for texts, as the vocabulary of a model spells them."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def __call__(self, text: str) -> str:
        """Lark for a text: its marks such as `<tool_call>` are tokens where the vocabulary has them, and DIGITS stands
        for any number, BREAK for a line break that may be there."""
        return " ".join(
            _spelled(piece) if token is None else f"<[{token}]>" for piece, token in self._codec.in_tokens(text)
        )

    def until(self, name: str, text: str) -> str:
        """A rule of Lark: anything up to and with a mark. The next thing in the grammar begins right after it."""
        pieces = self._codec.in_tokens(text)
        first = next((at for at, (_, token) in enumerate(pieces) if token is not None), -1)
        before = text if first < 0 else "".join(piece for piece, _ in pieces[:first])
        ending = re.escape(before).replace("/", "\\/").replace("\\\n", "\\n")
        words = f"/(.|\\n)*{ending}/"
        if first < 0:
            return f"{name}[lazy]: {words}"
        rest = self("".join(piece for piece, _ in pieces[first:]))
        return f"{name}: {name.upper()}_TEXT {rest}\n{name.upper()}_TEXT: {words}"


def _spelled(text: str) -> str:
    parts = re.split(f"([{DIGITS}{BREAK}])", text)
    return " ".join({DIGITS: "/[0-9]+/", BREAK: "/\\n?/"}.get(part) or literal(part) for part in parts if part)


def unconverted(text: str) -> str:
    """A grammar in GBNF or Lark that `converted` will make one of ours: that may take minutes, so it is done apart."""
    return json.dumps({"grammars": [{"ebnf": text}]})


def converted(grammar: str) -> str:
    """The same grammar with its unconverted parts converted."""
    if '"ebnf"' not in grammar:
        return grammar
    document = json.loads(grammar)
    for part in document["grammars"]:
        if (text := part.pop("ebnf", None)) is not None:
            part |= json.loads(of_ebnf(text))["grammars"][0]
    return json.dumps(document)


def of_ebnf(text: str) -> str:
    """A grammar in GBNF (llama.cpp's and xgrammar's EBNF) or in Lark's syntax; InvalidGrammarError when in neither."""
    try:
        return of_lark(any_to_lark(text))
    except Exception as error:  # whatever the converter trips over is the text's fault
        raise InvalidGrammarError(f"neither GBNF nor Lark: {error}") from error


def literal(text: str) -> str:
    """Quote a text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def tokenizer_of(bundle: TokenizerBundle, vocab_size: int) -> LLTokenizer:
    """llguidance's view of a tokenizer; takes a second for a large vocabulary. `vocab_size`: ids of the model."""
    document = msgspec.json.decode(bundle.tokenizer_json)
    document["truncation"] = document["padding"] = None
    text = json.dumps(document, ensure_ascii=False)
    return LLTokenizer(text, n_vocab=max(vocab_size, _size(document)), eos_token=list(bundle.eos_token_ids) or None)


def check(grammar: str, tokenizer: LLTokenizer) -> None:
    """InvalidGrammarError, in llguidance's words, when a grammar cannot be compiled.

    It is compiled as a worker will: to validate it takes half of that or less, and bounded here is what it costs there.
    """
    matcher = _compiled(grammar, tokenizer)
    if matcher.is_error():
        raise InvalidGrammarError(_complaint(matcher.get_error()))


def _complaint(error: str) -> str:
    """Translate an error for the author of the grammar, who has not seen the one that we make around a schema."""
    _, found, reason = error.strip().partition("failed to compile JSON schema: ")
    return _EXCERPT.split(reason)[0] if found else error.strip()


def matcher_of(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A compiled grammar, at its beginning; InvalidGrammarError when it is none."""
    matcher = _compiled(grammar, tokenizer)
    if matcher.is_error():
        raise InvalidGrammarError(first_line(matcher.get_error()))
    return matcher


def _compiled(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    return LLMatcher(tokenizer, grammar, log_level=0)


def first_line(text: str) -> str:
    """An error without the state of the parser."""
    return text.strip().split("\n", 1)[0]


def _size(document: dict[str, Any]) -> int:
    """One more than the largest id in tokenizer.json."""
    vocabulary = document["model"].get("vocab") or {}
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return 1 + max([*ids, *(token["id"] for token in document.get("added_tokens") or ())], default=0)
