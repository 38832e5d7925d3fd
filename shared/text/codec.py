"""Text in, token ids out, and back: tokenizer and chat template of one model, without transformers.

Invariants. `TextStream` is exact: the deltas of `push` and `flush` joined are `decode(all ids)`, and no delta ever
ends inside a character. A codec is built from a `TokenizerBundle`, which travels through the registry in Redis, so
that a process needs no model files.
"""

import asyncio
import codecs
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from shared.errors import InvalidRequestError
from shared.sequences import ModelCard
from shared.text.chat_template import ChatTemplate


class TokenizerBundle(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that is needed to write and read the texts of one model."""

    tokenizer_json: str
    chat_template: str
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]  # bos_token, eos_token, ... as the chat template names them
    tool_format: str = ""  # how the model writes calls (`languages/families.py`); "": by its template and vocabulary
    reasoning_format: str = ""  # and reasoning

    @property
    def sha256(self) -> str:
        """Name of the bundle in the registry: hash of its canonical JSON."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class TextCodec:
    """Tokenizer and chat template of one model; safe to use from any thread."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self._tokenizer: Tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate(bundle.chat_template) if bundle.chat_template else None
        added = self._tokenizer.get_added_tokens_decoder()
        self._added: dict[str, int] = {token.content: id_ for id_, token in added.items()}
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._spelled = _any_of(self._special)
        self._added_spelled = _any_of(self._added)
        self.decoder = DecoderShape.of(_decoder_section(bundle.tokenizer_json))
        self._visible = _Pieces(self, skip_special=True)
        self._all = _Pieces(self, skip_special=False)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows; a model may have more rows than that."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens` as the model wants a prompt to begin (and end)."""
        # Not `encode`: it holds the interpreter's lock, seconds for a megabyte, and a thread around it would not help.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token: int) -> str:
        """One token as OpenAI's logprobs show it: its text, or `bytes:\\xe2\\x80` when it is half a character."""
        data = self._all[token]
        if isinstance(data, str):
            return data
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for, which may be half a character."""
        data = self._all[token]
        return data.encode() if isinstance(data, str) else data

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Prompt text of a chat; InvalidRequestError when the template refuses it or there is none."""
        if self._template is None:
            raise InvalidRequestError("the model has no chat template: use /v1/completions", param="messages")
        named = {
            "tools": tools,
            "documents": None,
            **self.bundle.special_tokens,
            **variables,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render(messages, **named)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Prompt ids of a chat. The template writes the special tokens itself, so none are added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)
        return self.encode(text, add_special_tokens=False)

    def added_token(self, text: str) -> int | None:
        """The id of a token that was added to the vocabulary as a whole, such as `<tool_call>`."""
        return self._added.get(text)

    def in_tokens(self, text: str) -> list[tuple[str, int | None]]:
        """A text in pieces: tokens that were added to the vocabulary as a whole, and what stands between them."""
        pieces: list[tuple[str, int | None]] = []
        at = 0
        for found in self._added_spelled.finditer(text) if self._added_spelled is not None else ():
            pieces += [(text[at : found.start()], None), (found[0], self._added[found[0]])]
            at = found.end()
        return [(piece, token) for piece, token in [*pieces, (text[at:], None)] if piece]

    def token(self, token: int) -> str | None:
        """The vocabulary's own spelling of an id; None for an id that it does not know."""
        spelling: str | None = self._tokenizer.id_to_token(token)
        return spelling

    @property
    def special_tokens(self) -> frozenset[str]:
        """Spellings of the tokens that decoding hides."""
        return self._special

    def is_special(self, spelling: str) -> bool:
        """True if decoding hides this token."""
        return spelling in self._special

    @property
    def end(self) -> tuple[int, ...]:
        """The token that ends a text; (): the model has none."""
        named = self.added_token(self.bundle.special_tokens.get("eos_token", ""))
        return tuple(self.bundle.eos_token_ids[:1]) if named is None else (named,)

    def without_special(self, text: str) -> str:
        """A text with a space for each special token that is spelled in it, in one pass: none can appear by that."""
        return text if self._spelled is None else self._spelled.sub(" ", text)

    def stream(self, shown: Iterable[str] = ()) -> "TextStream":
        """Decodes one sequence; `shown` are special tokens that are not hidden."""
        return self.decoder.stream(self, self.visible_pieces(shown))

    def visible_pieces(self, shown: Iterable[str] = ()) -> "_Pieces":
        """id -> its share of the decoded text, special tokens empty, except those in `shown`."""
        special = frozenset(shown) & self._special
        if special == self._special:
            return self._all
        return _Pieces(self, skip_special=True, shown=special) if special else self._visible


def _any_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


class CardSource(Protocol):
    """Source of bundles: the worker registry."""

    async def tokenizer(self, sha256: str) -> TokenizerBundle:
        """The bundle with this hash."""


class CodecCache:
    """Codecs by tokenizer hash, each fetched from the registry and built once, however many wait for it."""

    def __init__(self, registry: CardSource) -> None:
        self._registry = registry
        self._codecs: dict[str, asyncio.Task[TextCodec]] = {}

    async def codec(self, card: ModelCard) -> TextCodec:
        """The codec of a model."""
        return await asyncio.shield(self.prepare(card))  # one waiter that goes does not end it for the others

    def prepare(self, card: ModelCard) -> "asyncio.Task[TextCodec]":
        """Begin to build the codec of a model, before anyone waits for it: a second for a large vocabulary."""
        task = self._codecs.get(card.tokenizer_sha256)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._build(card.tokenizer_sha256))
            task.add_done_callback(_looked_at)  # it may be without a waiter
            self._codecs[card.tokenizer_sha256] = task
        return task

    async def _build(self, sha256: str) -> TextCodec:
        return await asyncio.to_thread(TextCodec, await self._registry.tokenizer(sha256))


def _looked_at(task: "asyncio.Task[TextCodec]") -> None:
    if not task.cancelled():
        task.exception()


class TextStream(Protocol):
    """Decodes the ids of one sequence as they come; `TextCodec.stream` makes it."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; it may be empty while a character is unfinished."""

    def flush(self) -> str:
        """The text that was held back, as `decode` would show it at the end. Call it once."""


class DecoderShape(msgspec.Struct, frozen=True):
    """The part of a tokenizer's `decoder` section that decodes token by token.

    kind "bytes": GPT-2's byte alphabet (Llama 3, Qwen, ...). kind "pieces": SentencePiece's, with `<0xE2>` byte
    tokens and a word mark (Llama 2, Mistral, Gemma). kind "whole": anything else, decoded from the start each time.
    """

    kind: str
    replaced: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_left: int = 0  # spaces that go from the very start of the text

    @classmethod
    def of(cls, decoder: dict[str, Any] | None) -> "DecoderShape":
        """Read the `decoder` section of tokenizer.json."""
        if decoder is None:
            return cls("whole")
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            return cls("bytes")
        shape = re.fullmatch(r"(Replace )*(ByteFallback )?Fuse (Strip )?", "".join(f"{kind} " for kind in kinds))
        if shape is None:
            return cls("whole")
        replaced = [(step["pattern"].get("String", ""), step["content"]) for step in steps if "pattern" in step]
        strip: dict[str, Any] = steps[-1] if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
        if any(not pattern for pattern, _ in replaced) or strip["content"] != " " or strip["stop"]:
            return cls("whole")
        return cls("pieces", tuple(replaced), "ByteFallback" in kinds, int(strip["start"]))

    def piece(self, spelling: str) -> str | bytes:
        """A token's share of the text: bytes when it may be half a character."""
        if self.kind == "bytes":
            try:
                return bytes(map(_BYTE_OF.__getitem__, spelling))
            except KeyError:
                return spelling.encode()  # an added token in plain spelling
        if self.byte_fallback and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", spelling):
            return bytes([int(spelling[3:5], 16)])
        for pattern, content in self.replaced:
            spelling = spelling.replace(pattern, content)
        return spelling

    def stream(self, codec: TextCodec, pieces: "_Pieces") -> TextStream:
        """A fresh stream of this shape."""
        if self.kind == "bytes":
            return _ByteStream(pieces)
        if self.kind == "pieces":
            return _PieceStream(pieces, self.strip_left)
        return _WholeStream(codec, pieces)


class _TokenizerFile(msgspec.Struct):
    """The one section of tokenizer.json that we read ourselves."""

    decoder: dict[str, Any] | None = None


def _decoder_section(tokenizer_json: str) -> dict[str, Any] | None:
    return msgspec.json.decode(tokenizer_json, type=_TokenizerFile).decoder


class _Pieces(dict[int, "str | bytes"]):
    """id -> its share of the text, filled as ids are met."""

    def __init__(self, codec: TextCodec, *, skip_special: bool, shown: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._shown = shown
        self._codec = codec
        self.skip_special = skip_special

    def __missing__(self, token: int) -> str | bytes:
        piece = self._piece(token)
        self[token] = piece
        return piece

    def _piece(self, token: int) -> str | bytes:
        codec = self._codec
        spelling = codec.token(token)
        if spelling is None:
            return b""
        if self.skip_special and codec.is_special(spelling) and spelling not in self._shown:
            return b""
        if codec.decoder.kind == "whole":
            return codec.decode([token], skip_special_tokens=self.skip_special)
        return codec.decoder.piece(spelling)


class _ByteStream:
    """Python's incremental decoder replaces malformed bytes exactly as Rust's `from_utf8_lossy` does."""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces: dict[int, Any] = pieces  # bytes, all of them
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        if len(ids) == 1:
            return self._decoder.decode(pieces[ids[0]])
        return self._decoder.decode(b"".join([pieces[token] for token in ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceStream:
    """A run of byte tokens is one string if all of it is UTF-8, else one U+FFFD a byte: held back until it ends."""

    def __init__(self, pieces: _Pieces, strip_left: int) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip_left = strip_left

    def push(self, ids: Sequence[int]) -> str:
        return self._stripped("".join(self._pushed(ids)))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _pushed(self, ids: Sequence[int]) -> Iterable[str]:
        for token in ids:
            piece = self._pieces[token]
            if isinstance(piece, bytes):
                self._run += piece
            else:
                if self._run:
                    yield self._end_run()
                yield piece

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        if not self._strip_left or not text:
            return text
        kept = text
        while self._strip_left and kept.startswith(" "):
            kept = kept[1:]
            self._strip_left -= 1
        if kept:
            self._strip_left = 0
        return kept


class _WholeStream:
    """Decodes from the start each time, for decoders of unknown shape: exact where they only ever append."""

    def __init__(self, codec: TextCodec, pieces: _Pieces) -> None:
        self._codec = codec
        self._skip_special = pieces.skip_special
        self._ids: list[int] = []
        self._sent = ""

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        return self._advance(self._decoded().rstrip("\ufffd"))

    def flush(self) -> str:
        return self._advance(self._decoded())

    def _decoded(self) -> str:
        return self._codec.decode(self._ids, self._skip_special)

    def _advance(self, text: str) -> str:
        if not text.startswith(self._sent):
            return ""
        delta = text[len(self._sent) :]
        self._sent = text
        return delta


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def answered(codec: TextCodec, prompt: str | Sequence[dict[str, Any] | int] | None, answer: str) -> list[int]:
    """Ids of a prompt with its answer, as reward models read them in training, in jobs and when they serve.

    A chat goes through the model's chat template with the answer as its last message; a text is followed by the answer;
    a prompt of ids must be this model's. Special tokens that are spelled in the answer become spaces, so that what is
    judged cannot speak for itself. InvalidRequestError when the chat template refuses the chat.
    """
    answer = codec.without_special(answer)
    if prompt is None or isinstance(prompt, str):
        return codec.encode((prompt or "") + answer)
    if ids := [item for item in prompt if isinstance(item, int)]:
        return [*ids, *codec.encode(answer, add_special_tokens=False)]
    messages = [item for item in prompt if not isinstance(item, int)]
    return codec.encode_chat([*messages, {"role": "assistant", "content": answer}], add_generation_prompt=False)
