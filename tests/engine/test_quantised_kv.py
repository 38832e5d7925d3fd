"""KV in 8 and 4 bits: as mlx-lm quantises it, close to what it stands for, smaller, and refused where it cannot be."""

import threading
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_model.config import EngineConfig, SlotConfig
from mlx_model.kv.cuda import attention as cuda_attention
from mlx_model.kv.kinds import leaves
from mlx_model.kv.layout import layout_of
from mlx_model.kv.quantised import BatchQuantisedKVCache, Packing
from mlx_model.loader import LoadedModel, load_model
from shared.errors import SetupError
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.adapter_models import make_adapter
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.kv_models import GROUP, QUANTISED, small
from tests.engine.small_models import LLAMA, TINY_SHAPE, write_model
from tests.waiting import HANG_S
from worker.engine.adapter_slots import AdapterSlots


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (8, 32), (4, 128), (4, 32)])
def test_what_is_packed_is_what_mlx_quantises_wherever_it_lies(dtype: mx.Dtype, bits: int, group_size: int) -> None:
    numbers = mx.random.normal((3, 2, 40, 128), key=mx.random.key(0)).astype(dtype)
    wanted = mx.dequantize(*mx.quantize(numbers, group_size=group_size, bits=bits), group_size=group_size, bits=bits)
    packing = Packing(bits, group_size, dtype)
    packed = packing.pack(numbers)
    padded = mx.pad(packed, [(0, 1), (0, 0), (5, 7), (0, 0)])
    for array in (packed, padded[:3, :, 5:45]):
        assert mx.allclose(packing.unpack(array, 128), wanted, atol=0.02 if dtype != mx.float32 else 1e-5)
    of_a_scale = 2 * dtype.size * 8 / group_size  # and a bias
    assert packed.nbytes * 8 == numbers.size * (bits + of_a_scale)


@pytest.mark.skipif(mx.cuda.is_available(), reason="the attention of mlx-lm's own cache has no kernels there")
@pytest.mark.parametrize("name", ["llama 8", "qwen3 4"])
def test_a_row_of_a_batch_has_the_tokens_that_mlx_lms_cache_gives_it_alone(name: str, llama: LoadedModel) -> None:
    loaded = small(name, llama)
    bench = Bench(loaded, block_size=16)
    specs = [spec(f"s{at}", prompt_of(20 + 40 * at, at)) for at in range(3)]
    bench.submit(*specs)
    bench.run()
    for one in specs:
        cache = [QuantizedKVCache(GROUP, int(name[-1])) for _ in loaded.model.layers]
        logits = loaded.model(mx.array([one.prompt_ids]), cache=cache)[0, -1]
        for token, logprob in zip(bench.tokens(one.id), bench.logprobs(one.id), strict=True):
            assert token == mx.argmax(logits).item()
            assert logprob == pytest.approx((logits[token] - mx.logsumexp(logits)).item(), abs=1e-3)
            logits = loaded.model(mx.array([[token]]), cache=cache)[0, -1]


@pytest.mark.parametrize("name", QUANTISED)
def test_every_kind_of_attention_reads_close_to_what_was_written(name: str, llama: LoadedModel) -> None:
    """Random weights carry a small difference far: log-probabilities have a spread of 2 to 3 here."""
    loaded, bits = small(name, llama), int(name[-1])
    scored = msgspec.structs.replace(spec("s", prompt_of(40)), kind="score", score_ids=tuple(prompt_of(60, 1)))
    told = []
    for each in (loaded, replace(loaded, kv=layout_of(loaded.model, 0, GROUP))):
        bench = Bench(each, prefix_cache_bytes=0)
        bench.submit(scored)
        bench.run()
        told.append(np.array(bench.events["s"][-1].score_logprobs))
    apart = np.abs(told[0] - told[1])
    assert 0 < apart.mean() < (0.1 if bits == 8 else 1.0), apart.mean()


def test_embeddings_are_close_and_rows_beside_them_stay_as_they_are(llama: LoadedModel) -> None:
    loaded = small("qwen3 8", llama)
    ids = tuple(prompt_of(90))
    wanted = SequenceSpec("e", "m", ids, SamplingParams(0, 0), kind="embed", pooling="mean")
    vectors = []
    for each in (loaded, replace(loaded, kv=layout_of(loaded.model, 0, GROUP))):
        bench = Bench(each, prefill_chunk=16)
        bench.submit(wanted, spec("s", prompt_of(20)))
        bench.run()
        vectors.append(np.frombuffer(bench.events["e"][-1].embedding or b"", "<f4"))
    cosine = vectors[0] @ vectors[1] / np.linalg.norm(vectors[0]) / np.linalg.norm(vectors[1])
    assert cosine > 0.999


def test_a_row_that_is_taken_over_goes_on_identically(llama: LoadedModel) -> None:
    loaded = small("llama 4", llama)
    one = spec("s", prompt_of(50), max_tokens=20, temperature=1.0, seed=4)
    whole = Bench(loaded)
    whole.submit(one)
    whole.run()
    second = Bench(loaded)
    second.submit(spec("other", prompt_of(90)))
    second.submit(one, prior=tuple(whole.events["s"][:9]), attempt=2)
    second.run()
    assert [*whole.tokens("s")[:9], *second.tokens("s")] == whole.tokens("s")


def test_rows_of_several_adapters_share_the_batch(llama_folder: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", TINY_SHAPE)
    loaded = load_model(EngineConfig(str(folder), kv_bits=8, kv_group_size=32))
    made = make_adapter(loaded.model, tmp_path / "adapters", keys=("self_attn.k_proj", "self_attn.v_proj"))
    read = threading.Event()
    slots = AdapterSlots(loaded, SlotConfig(), read.set)
    slots.provide(made.path, made.manifest)
    bench = Bench(loaded)
    bench.engine._model.adapters = slots
    specs = [msgspec.structs.replace(spec(f"s{at}", prompt_of(40)), adapter="a@1" if at else None) for at in range(2)]
    bench.submit(*specs)
    bench.run()
    while bench.engine.has_rows:  # the adapter is read beside the turns
        assert read.wait(HANG_S)
        read.clear()
        bench.turn()
        bench.run()
    assert bench.tokens("s0") != bench.tokens("s1")
    reference = replace(loaded, model=made.reference, kv=layout_of(made.reference, 8, 32))
    alone = Bench(reference)
    alone.submit(spec("s1", prompt_of(40)))
    alone.run()
    assert alone.tokens("s1") == bench.tokens("s1")
    slots.close()


# -- memory


@pytest.mark.parametrize(("bits", "least"), [(8, 1.8), (4, 3.4)])
def test_more_rows_fit_the_same_memory(bits: int, least: float, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", LLAMA | {"head_dim": 64})
    held, counted = [], []
    for kv_bits in (0, bits):
        loaded = load_model(EngineConfig(str(folder), kv_bits=kv_bits, dtype="bfloat16"))
        bench = Bench(loaded)
        bench.submit(*(spec(f"s{at}", prompt_of(240), max_tokens=8) for at in range(4)))
        bench.until(lambda bench=bench: all(len(bench.tokens(f"s{at}")) > 2 for at in range(4)))  # type: ignore[misc]
        held.append(sum(leaf.nbytes for leaf in leaves(bench.engine._batch._cache[:-1])))
        counted.append(bench.engine.stats().kv_bytes)
        bench.run()
        assert bench.engine.stats().prefix.bytes == 3 * 64 * loaded.card.kv_bytes_per_token, "equal prompts"
    assert held[0] / held[1] >= least and counted[0] / counted[1] >= least


# -- what cannot be


def test_a_model_without_kv_to_quantise_is_refused_with_the_reasons(llama: LoadedModel) -> None:
    with pytest.raises(SetupError, match=r"--kv-bits 8: .* 2 x ArraysCache, of bounded size"):
        layout_of(small("mamba2", llama).model, 8, 64)
    with pytest.raises(SetupError, match=r"2 x heads of 16 numbers, which --kv-group-size 64 does not divide"):
        layout_of(llama.model, 4, 64)
    with pytest.raises(SetupError, match="--kv-group-size 48: MLX quantises in groups of 32, 64 or 128"):
        layout_of(llama.model, 4, 48)


def test_a_model_that_cannot_read_it_is_refused() -> None:
    class OddModel:
        """Reads the arrays of its cache by itself."""

        layers = (None,)

        def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
            kv = mx.ones((1, 1, tokens.shape[1], 64))
            cache[0].update_and_fetch(kv, kv)
            return cache[0].keys[:, 0] @ mx.ones((64, 5))

    with pytest.raises(SetupError, match="--kv-bits 8: this model's attention cannot read quantised KV"):
        layout_of(OddModel(), 8, 64)


def test_only_layers_whose_attention_can_are_decoded_from_their_codes(llama: LoadedModel) -> None:
    found = {name: small(name, llama).kv.packings for name in ("llama 4", "gpt_oss 4", "deepseek_v3 8", "lfm2 4")}
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    here = "parts" if on_cpu else "packed" if cuda_attention.install() else "unpacked"
    read = {name: {each.read for each in each if each} for name, each in found.items()}
    assert read == {"llama 4": {here}, "gpt_oss 4": {"unpacked"}, "deepseek_v3 8": {"unpacked"}, "lfm2 4": {here}}
    assert found["lfm2 4"][0] is None, "its recurrent layer stays as it is"


def test_what_was_written_is_read_back_the_same_in_a_step_and_in_a_piece(llama: LoadedModel) -> None:
    packing = small("llama 8", llama).kv.packings[0]
    assert packing is not None
    batch = BatchQuantisedKVCache(replace(packing, read="parts"), [0, 3])
    kv = mx.random.normal((2, 1, 6, GROUP), key=mx.random.key(1))
    before, _ = batch.update_and_fetch(kv, kv)
    assert not hasattr(batch, "bits")
    (codes, scales, biases), _ = batch.update_and_fetch(kv[:, :, :1], kv[:, :, :1])
    assert (batch.bits, batch.group_size) == (8, GROUP)
    after = mx.dequantize(codes, scales, biases, group_size=GROUP, bits=8)
    assert mx.allclose(after[:, :, :6], before, atol=1e-5)
