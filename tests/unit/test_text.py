"""TextCodec and TextStream against the tokenizers library, for every decoder shape that models use."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.errors import InvalidRequestError
from shared.text.codec import TextCodec, TokenizerBundle

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the cat sat on the mat, twenty 20 times",
    "Ünïcödé ist schön – 日本語 😀👍🏽",
    "def f(x):\n    return x + 1\n",
]


@cache
def byte_level() -> TextCodec:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens(["<tool é>"])  # an added token that is not special and not in the byte alphabet
    return TextCodec(TokenizerBundle(tokenizer.to_str(), CHATML, (1,), {"eos_token": "<|im_end|>"}))


def sentencepiece_like(decoder: object) -> TextCodec:
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", "▁the", "▁cat", "s", "▁▁", "日", "é", "a", "▁<0x41>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.decoder = decoder
    return TextCodec(TokenizerBundle(tokenizer.to_str(), "", (2,), {}))


@cache
def llama2() -> TextCodec:
    return sentencepiece_like(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


@cache
def gemma() -> TextCodec:
    return sentencepiece_like(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


@cache
def metaspace() -> TextCodec:
    return sentencepiece_like(decoders.Metaspace())


CODECS = {"byte_level": byte_level, "llama2": llama2, "gemma": gemma}


def streamed(codec: TextCodec, chunks: list[list[int]]) -> str:
    stream = codec.stream()
    return "".join([*(stream.push(chunk) for chunk in chunks), stream.flush()])


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
@settings(max_examples=120)
def test_streamed_deltas_join_to_the_whole_decode_for_any_ids(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]()
    ids = st.integers(0, codec.vocab_size + 3)  # a model may have more rows than the tokenizer knows
    chunks = data.draw(st.lists(st.lists(ids, max_size=5), max_size=40))
    flat = [token for chunk in chunks for token in chunk]
    assert streamed(codec, chunks) == codec.decode(flat)


@pytest.mark.parametrize("name", CODECS)
@given(
    pieces=st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xC3, 0x41]), max_size=24)
)
@settings(max_examples=120)
def test_malformed_byte_runs_decode_as_the_library_decodes_them(name: str, pieces: list[int]) -> None:
    codec = CODECS[name]()
    by_byte = {codec.token_bytes(i): i for i in range(codec.vocab_size)}
    ids = [by_byte[bytes([piece])] for piece in pieces]
    assert streamed(codec, [[token] for token in ids]) == codec.decode(ids)


@given(text=st.text(max_size=60))
@settings(max_examples=100)
def test_text_survives_encoding_and_streaming_byte_level(text: str) -> None:
    codec = byte_level()
    ids = codec.encode(text)
    assert streamed(codec, [[token] for token in ids]) == codec.decode(ids)


def test_no_delta_ends_inside_a_character() -> None:
    codec = byte_level()
    stream = codec.stream()
    deltas = [stream.push([token]) for token in codec.encode("a👍🏽b")]
    assert "".join(deltas) == "a👍🏽b"
    assert not any("\ufffd" in delta for delta in deltas)


def test_half_a_character_at_the_end_is_flushed_as_decode_shows_it() -> None:
    codec = byte_level()
    ids = codec.encode("x👍")[:-1]
    stream = codec.stream()
    assert "".join(stream.push([token]) for token in ids) == "x"
    assert "x" + stream.flush() == codec.decode(ids)


def test_a_decoder_of_unknown_shape_still_streams_exactly() -> None:
    codec = metaspace()
    ids = [codec.encode("x")[0], *[260, 261, 262, 266]]
    assert codec.decoder.kind == "whole"
    assert streamed(codec, [[token] for token in ids]) == codec.decode(ids)


def test_token_text_and_bytes_show_partial_characters() -> None:
    codec = byte_level()
    first, *rest = [codec.token_bytes(token) for token in codec.encode("👍")]
    assert b"".join([first, *rest]) == "👍".encode()
    token = next(i for i in range(codec.vocab_size) if codec.token_bytes(i) == b"\xf0")
    assert codec.token_text(token) == "bytes:\\xf0"
    assert codec.token_text(codec.encode("t")[0]) == "t"
    assert gemma().token_bytes(3 + 0xE2) == b"\xe2"
    assert gemma().token_text(260) == " the"


def test_special_tokens_are_hidden_in_text_and_shown_in_logprobs() -> None:
    codec = byte_level()
    assert codec.decode([1]) == ""
    assert codec.stream().push([1]) == ""
    assert codec.token_text(1) == "<|im_end|>"


def test_chat_is_encoded_with_the_special_tokens_of_the_template_only() -> None:
    codec = byte_level()
    ids = codec.encode_chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 0
    assert codec.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def with_template(template: str) -> TextCodec:
    bundle = byte_level().bundle
    return TextCodec(TokenizerBundle(bundle.tokenizer_json, template, (1,), {"bos_token": "<|im_start|>"}))


def test_a_template_that_refuses_speaks_in_its_own_words() -> None:
    codec = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        codec.render_chat([{"role": "user", "content": "x"}])


def test_a_template_that_stumbles_over_the_messages_is_the_requests_error() -> None:
    codec = with_template("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(InvalidRequestError) as caught:
        codec.render_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_templates_cannot_leave_the_sandbox() -> None:
    codec = with_template("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError):
        codec.render_chat([])


def test_templates_have_the_globals_and_filters_that_models_expect() -> None:
    codec = with_template(
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}|"
        "{% set ns = namespace(x=1) %}{{ ns.x }}{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "2"}]
    rendered = codec.render_chat(messages)
    assert rendered == '<|im_start|>{"role": "user", "content": "<é>"}|14True'


def test_rendering_equals_transformers() -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = (
        "{%- for m in messages %}\n    {%- if m.role == 'system' %}\n[{{ m.content | trim }}]\n    {%- else %}\n"
        "{{ m | tojson(indent=1) }}\n{% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n  >{% endif %}"
    )
    messages = [{"role": "system", "content": " s "}, {"role": "user", "content": "ü\n"}]
    expected, _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert with_template(template).render_chat(messages) == expected[0]


def test_a_bundle_is_named_by_its_content_whatever_the_order_of_its_keys() -> None:
    one = TokenizerBundle("{}", "", (1,), {"a": "1", "b": "2"})
    two = TokenizerBundle("{}", "", (1,), {"b": "2", "a": "1"})
    assert one.sha256 == two.sha256 != TokenizerBundle("{}", "x", (1,), {}).sha256


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        gemma().render_chat([{"role": "user", "content": "x"}])


def test_bundles_are_plain_json() -> None:
    assert json.loads(byte_level().bundle.tokenizer_json)["decoder"]["type"] == "ByteLevel"
