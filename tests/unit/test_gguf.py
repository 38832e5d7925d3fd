"""GGUF files: what is read, what is kept exactly, and what bad files are told."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer
from typer.testing import CliRunner

from api.cli.main import app
from shared.errors import SetupError
from shared.gguf import blocks
from shared.gguf.cached import FOLDER, SIZE_GB, cached_folder
from shared.gguf.conversion import Conversion
from shared.gguf.file import GgufFile
from shared.gguf.tokenizer import build_tokenizer
from tests.gguf_files import byte_tokens, write_gguf

FIGURES = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 2,
}
SHAPES = {"attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32)}
SHAPES |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}


def metadata(**more: Any) -> dict[str, Any]:
    figures = {f"llama.{key}": value for key, value in FIGURES.items()}
    return {"general.architecture": "llama", **figures, **byte_tokens(320), **more}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {f"blk.0.{name}.weight": shape for name, shape in SHAPES.items()}
    shapes |= {"token_embd.weight": (320, 32), "output_norm.weight": (32,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", metadata(), tensors(), GGMLQuantizationType.Q4_0)


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_that_stay_quantised_mean_what_llama_cpp_says(form: str) -> None:
    kind = GGMLQuantizationType[form]
    stored = quantize(np.random.default_rng(1).normal(size=(6, 96)).astype(np.float32), kind)
    bits = blocks.BITS[kind]
    packed = blocks.weights(kind, stored)
    numbers = (packed[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & ((1 << bits) - 1)
    numbers = numbers.reshape(6, 3, blocks.GROUP).astype(np.float32)
    scales, biases = (each(kind, stored).astype(np.float32)[..., None] for each in (blocks.scales, blocks.biases))
    np.testing.assert_array_equal((numbers * scales + biases).reshape(6, 96), dequantize(stored, kind))


def test_other_numbers_become_16_bits_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).normal(size=(7, 256)).astype(np.float32)
    stored = quantize(values, GGMLQuantizationType.Q5_1)
    monkeypatch.setattr(blocks, "AT_ONCE", 3 * stored.shape[-1])
    halves = b"".join(blocks.in_16_bits(GGMLQuantizationType.Q5_1, stored, brain=False))
    expected = dequantize(stored, GGMLQuantizationType.Q5_1).astype(np.float16)
    np.testing.assert_array_equal(np.frombuffer(halves, np.float16).reshape(7, 256), expected)
    brains = b"".join(blocks.in_16_bits(GGMLQuantizationType.F32, values.view(np.uint8), brain=True))
    widened = (np.frombuffer(brains, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(7, 256)
    np.testing.assert_allclose(widened, values, rtol=1 / 256)


@pytest.mark.parametrize("form", [kind for kind in GGMLQuantizationType if blocks.is_readable(kind)])
def test_each_form_that_is_called_readable_can_be_read(form: GGMLQuantizationType) -> None:
    from gguf.constants import GGML_QUANT_SIZES

    numbers, size = GGML_QUANT_SIZES[form]
    data = b"".join(blocks.in_16_bits(form, np.zeros((2, size), np.uint8), brain=False))
    assert len(data) == 2 * 2 * numbers


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "cannot read"),
    "another magic": (lambda data: b"GGML" + data[4:], "no GGUF file"),
    "another version": (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "version 9"),
    "cut in the header": (lambda data: data[:700], "is cut"),
    "cut in the tensors": (lambda data: data[:-64], "is cut: tensor"),
    "a huge count of tensors": (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "claims"),
    "a huge count of entries": (lambda data: data[:16] + struct.pack("<Q", 1 << 62) + data[24:], "claims"),
    "a huge text": (lambda data: data[:24] + struct.pack("<Q", 1 << 63) + data[32:], "is cut"),
    "no UTF-8": (lambda data: data[:32] + b"\xff\xfe" + data[34:], "no UTF-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_refused_in_words(name: str, whole: Path) -> None:
    damage, message = BROKEN[name]
    whole.write_bytes(damage(whole.read_bytes()))
    with pytest.raises(SetupError, match=message):
        Conversion(whole)


def test_no_cut_of_a_header_ends_otherwise_than_in_words(tmp_path: Path) -> None:
    small = metadata() | {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1], "tokenizer.ggml.merges": []}
    data = write_gguf(tmp_path / "all.gguf", small, tensors(), GGMLQuantizationType.F16).read_bytes()
    header = data.index(b"output_norm.weight") + 60
    for length in range(1, header, 7):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(SetupError):
            GgufFile(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "rwkv9"}, "architecture is 'rwkv9'; llama"),
        ({"llama.block_count": 2}, "number 1 is not as the first"),
        ({"llama.context_length": "long"}, "context_length is 'long'"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs by layer"),
        ({"llama.expert_count": 8}, "with experts"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "'longrope'"),
        ({"tokenizer.ggml.pre": "martian"}, "'martian'"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.merges": ["q r"]}, "merges do not fit"),
    ],
)
def test_what_cannot_be_converted_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf", metadata(**change), tensors(), GGMLQuantizationType.F16)
    with pytest.raises(SetupError, match=message):
        Conversion(path)


def test_a_tensor_that_the_family_does_not_have_is_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "odd.gguf", metadata(), tensors() | {"blk.0.ssm_a.weight": np.zeros(32)}, GGMLQuantizationType.F16
    )
    with pytest.raises(SetupError, match=r"no tensor blk\.0\.ssm_a"):
        Conversion(path)


def test_tiny_model_s_tokenizer_comes_back_from_its_tokens_and_merges(tmp_path: Path) -> None:
    source = Path("models/tiny/tokenizer.json")
    ours = Tokenizer.from_file(str(source))
    described = json.loads(source.read_text())
    texts = sorted(ours.get_vocab(), key=ours.token_to_id)
    special = {token["content"] for token in described["added_tokens"]}
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in described["model"]["merges"]]
    stored = {
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if text in special else 1 for text in texts],
        "tokenizer.ggml.merges": merges,
    }
    path = write_gguf(tmp_path / "t.gguf", metadata(**stored), tensors(), GGMLQuantizationType.F16)
    built = build_tokenizer(GgufFile(path))
    text = Path("README.md").read_text() + "1234 ßé日本 😀 <|im_end|>"
    assert built.tokenizer.encode(text).ids == ours.encode(text).ids
    assert built.settings["eos_token"] == texts[257]


def test_a_sentencepiece_tokenizer_comes_back_from_its_scores(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text(Path("docs/internals/architecture.md").read_text())
    sentencepiece.SentencePieceTrainer.train(
        input=str(words),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    ids = range(theirs.get_piece_size())
    kinds = [2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in ids]
    stored = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [theirs.get_score(i) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    path = write_gguf(tmp_path / "s.gguf", metadata(**stored), tensors(), GGMLQuantizationType.F16)
    built = build_tokenizer(GgufFile(path))
    for text in ("A worker claims 32 sequences.", " two  spaces ", "日本 é\n\nx", Path("README.md").read_text()):
        assert built.tokenizer.encode(text).ids == [1, *theirs.encode(text)]
        assert built.tokenizer.decode(theirs.encode(text)) == text


def test_a_file_is_converted_once_and_the_oldest_folder_goes(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv(SIZE_GB, "0.0005")
    (left := tmp_path / "cache" / "x.partial-of-a-kill").mkdir(parents=True)
    first = cached_folder(whole)
    made = (first / "config.json").stat().st_ino
    assert cached_folder(whole) == first and (first / "config.json").stat().st_ino == made
    assert not left.exists()
    other = write_gguf(tmp_path / "other.gguf", metadata(), tensors(), GGMLQuantizationType.F32)
    monkeypatch.setenv(SIZE_GB, "0.0000001")
    second = cached_folder(other)
    assert second.is_dir() and not first.exists()
    write_gguf(other, metadata(**{"llama.context_length": 32}), tensors(), GGMLQuantizationType.F32)
    assert json.loads((cached_folder(other) / "config.json").read_text())["max_position_embeddings"] == 32


def test_the_command_converts_and_refuses_without_a_traceback(whole: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["convert", str(whole), str(tmp_path / "out")])
    assert run.exit_code == 0 and "8 tensors as they were" in run.output
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    again = CliRunner().invoke(app, ["convert", str(whole), str(tmp_path / "out")])
    assert again.exit_code == 2 and "is not empty" in again.output
    missing = CliRunner().invoke(app, ["convert", str(tmp_path / "none.gguf"), str(tmp_path / "o")])
    assert missing.exit_code == 2 and "cannot read" in missing.output
