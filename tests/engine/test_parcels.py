"""KV as bytes: what comes back is what went in, or nothing."""

from pathlib import Path

import mlx.core as mx
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_model.kv.quantised import Packing, QuantisedKVCache
from worker.engine.prefixes.parcels import (
    HostArray,
    KvParcel,
    Label,
    UnusableParcelError,
    as_array,
    as_bytes,
    identity_of,
    label_of,
    on_host,
    pack,
    unpack,
)
from worker.engine.prefixes.slabs import Layers

LABEL = Label("us", (b"one", b"two"), "policy@3", "sha", (5, 6, 7), 131)


def whole(label: Label, cut: Layers, states: Layers) -> bytes:
    packed = pack(KvParcel(label, *([tuple(map(host_of, leaf)) for leaf in layers] for layers in (cut, states))))
    data = b"".join([packed.head, *packed.parts])
    assert len(data) == packed.nbytes
    return data


def host_of(array: mx.array) -> HostArray:
    mx.eval(bytes_of := as_bytes(array))
    return on_host(array, bytes_of)


def some_layers() -> tuple[Layers, Layers]:
    """Of every dtype that a cache holds, strided ones and those of no position among them."""
    mx.random.seed(0)
    floats = mx.random.normal((3, 2, 40, 8))
    rows = [floats.astype(dtype)[1:2, :, 3:30] for dtype in (mx.float32, mx.float16, mx.bfloat16)]
    packed = mx.random.randint(0, 1 << 31, (1, 2, 27, 4)).astype(mx.uint32)
    cut = [(rows[0], rows[1]), (packed, rows[2], rows[2] + 1)]
    states = [(mx.random.normal((1, 3, 8)).astype(mx.bfloat16), mx.array([[7]], mx.int32)), (mx.zeros((1, 2, 0, 4)),)]
    return cut, states


def test_all_arrays_come_back_as_they_were() -> None:
    cut, states = some_layers()
    parcel = unpack(whole(LABEL, cut, states), "us")
    assert parcel.label == LABEL
    for layers, found in ((cut, parcel.cut), (states, parcel.states)):
        assert [len(leaf) for leaf in found] == [len(leaf) for leaf in layers]
        for array, host in zip(sum(layers, ()), sum(found, ()), strict=True):
            restored = as_array(host)
            assert (restored.dtype, restored.shape) == (array.dtype, array.shape)
            assert mx.array_equal(restored, array)


def test_a_parcel_is_a_safetensors_file(tmp_path: Path) -> None:
    cut, states = some_layers()
    path = tmp_path / "p.safetensors"
    path.write_bytes(whole(LABEL, cut, states))
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    assert mx.array_equal(arrays["cut.1.2"], cut[1][2])
    assert mx.array_equal(arrays["state.0.0"], states[0][0])
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata()["format"] == "mlx"
        assert set(file.keys()) == set(arrays)


def test_the_label_is_in_the_first_bytes() -> None:
    data = whole(LABEL, *some_layers())
    assert label_of(data[:4096]) == (LABEL, len(data))
    with pytest.raises(UnusableParcelError):
        label_of(data[:40])


SMALL = whole(LABEL, [(mx.arange(12).reshape(1, 1, 3, 4).astype(mx.float16),)], [])


@given(st.integers(0, 8 * len(SMALL) - 1))
def test_a_parcel_with_one_flipped_bit_gives_nothing(bit: int) -> None:
    data = bytearray(SMALL)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(UnusableParcelError):
        unpack(data, "us")


@given(st.integers(0, len(SMALL) - 1))
def test_a_parcel_that_is_cut_short_gives_nothing(length: int) -> None:
    with pytest.raises(UnusableParcelError):
        unpack(SMALL[:length], "us")


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}", SMALL + b"\0"])
def test_what_is_no_parcel_gives_nothing(data: bytes) -> None:
    with pytest.raises(UnusableParcelError):
        unpack(data, "us")


def test_what_something_else_has_computed_gives_nothing() -> None:
    with pytest.raises(UnusableParcelError, match="another model"):
        unpack(SMALL, "them")


def test_an_identity_tells_apart_all_that_kv_depends_on() -> None:
    plain = [KVCache(), ArraysCache(2)]
    identities = {
        identity_of("base", "bfloat16", 64, plain),
        identity_of("other", "bfloat16", 64, plain),
        identity_of("base", "float32", 64, plain),
        identity_of("base", "bfloat16", 16, plain),
        identity_of("base", "bfloat16", 64, [KVCache(), ArraysCache(3)]),
        identity_of("base", "bfloat16", 64, [RotatingKVCache(16), ArraysCache(2)]),
        identity_of("base", "bfloat16", 64, [RotatingKVCache(32), ArraysCache(2)]),
        identity_of("base", "bfloat16", 64, [QuantisedKVCache(Packing(8, 64, mx.bfloat16)), ArraysCache(2)]),
        identity_of("base", "bfloat16", 64, [QuantisedKVCache(Packing(4, 64, mx.bfloat16)), ArraysCache(2)]),
        identity_of("base", "bfloat16", 64, [QuantisedKVCache(Packing(4, 32, mx.bfloat16)), ArraysCache(2)]),
    }
    assert len(identities) == 10
    assert identity_of("base", "bfloat16", 64, [KVCache(), ArraysCache(2)]) in identities


def test_equal_labels_have_equal_names_and_others_do_not() -> None:
    same = Label("us", (b"one", b"two"), "policy@3", "sha", (5, 6, 7), 131)
    assert same.name == LABEL.name
    others = [
        Label("them", LABEL.keys),
        Label("us", LABEL.keys),
        Label("us", LABEL.keys, tail=()),
    ]
    assert len({LABEL.name, *(other.name for other in others)}) == 4
