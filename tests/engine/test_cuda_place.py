"""KV, plain or packed, written and read in place on CUDA: steps say what they say by MLX's updates."""

from collections import Counter
from itertools import accumulate, product
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from mlx_model.config import EngineConfig, SpeculationConfig
from mlx_model.device import on_cuda
from mlx_model.kv.cuda import attention as cuda_attention
from mlx_model.kv.cuda import place
from mlx_model.kv.cuda.beginnings import blocks_of
from mlx_model.kv.kinds import ragged, shared, take_back
from mlx_model.kv.quantised import BatchQuantisedKVCache, Packing
from mlx_model.kv.ragged import RaggedKVCache, have_written, may_be_in_place, packing_of, with_room
from mlx_model.kv.shared import Groups, SharedKVCache
from mlx_model.loader import LoadedModel, load_model
from mlx_model.step.cuda.rotary import Rotary
from mlx_model.step.decode_step import DecodeStep
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.small_models import QWEN3_BENCH, write_model
from tests.engine.test_cuda_attention import SCALE, drawn, needs_cuda, seen_by, wanted
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest


def batch(length: int = 5, room: int | None = None) -> BatchKVCache:
    """Three rows, of which two have padding, behind so many positions."""
    cache = BatchKVCache([0, 2, 1])
    cache.update_and_fetch(*(mx.random.normal((3, 2, length, 4)) for _ in range(2)))
    if room is not None:
        cache.keys, cache.values = cache.keys[..., :room, :], cache.values[..., :room, :]
    return cache


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("length", "room"), [(5, None), (5, 6), (255, None), (256, None)])
def test_room_is_behind_what_is_written_and_what_is_counted_is_what_an_update_counts(
    length: int, room: int | None, apart: bool
) -> None:
    ours, theirs = batch(length, room), batch(length)
    theirs.keys, theirs.values = (mx.array(each[..., : length + 1, :]) for each in (ours.keys, ours.values))
    both = [ragged([each]) if apart else [each] for each in (ours, theirs)]
    if apart:
        for each in both:
            take_back(each, [1, 0, 3], [0, 0, 0])
    (ours,), (theirs,) = both
    assert may_be_in_place([ours])
    end, held = ours._idx, mx.array(ours.keys)
    ((keys, values),) = with_room([ours], 3)
    assert keys is ours.keys and values is ours.values
    assert keys.shape == values.shape and keys.shape[2] >= end + 3
    assert keys.shape[2] % ours.step == 0, "whole steps: few lengths are compiled for"
    assert mx.array_equal(keys[..., :end, :], held[..., :end, :])
    have_written([ours], 3)
    theirs.update_and_fetch(*(mx.zeros((3, 2, 3, 4)) for _ in range(2)))
    assert ours._idx == theirs._idx and mx.array_equal(ours.offset, theirs.offset)
    places_B = (ours.left_padding + ours.offset).tolist()
    behind = ours.slack.positions if apart else [0, 0, 0]
    assert places_B == [ours._idx - each for each in behind], "where a row ends is its padding and what it has read"


@pytest.mark.parametrize("apart", [False, True])
def test_packed_kv_has_the_same_room(apart: bool) -> None:
    packing = Packing(8, 64, mx.float16, "packed")
    plain, packed = BatchKVCache([0, 2, 1]), BatchQuantisedKVCache(packing, [0, 2, 1])
    for length in (300, 2):  # as a prompt and a step that is not in place leave it
        new = [mx.random.normal((3, 2, length, 64)) for _ in range(2)]
        plain.update_and_fetch(*new)
        packed.update_and_fetch(*new)
    both = [ragged([each]) if apart else [each] for each in (plain, packed)]
    if apart:
        for each in both:
            take_back(each, [1, 0, 3], [0, 0, 0])
    for each in both:
        assert may_be_in_place(each)
        assert with_room(each, 2)[0][0].shape[2] == 512
    assert packing_of(both[1]) == packing and packing_of(both[0]) is None
    assert both[1][0].keys.shape[3] == packing.words(64)
    assert not may_be_in_place([plain, packed]) and not may_be_in_place([packed, plain]), "a model of both"
    unpacked = BatchQuantisedKVCache(Packing(8, 64, mx.float16), [0, 2, 1])
    unpacked.update_and_fetch(*new)
    assert not may_be_in_place([unpacked]), "which its model's attention cannot read as it is"


def test_other_kv_is_not_written_in_place() -> None:
    window = BatchRotatingKVCache(8, [0, 0])
    window.update_and_fetch(*(mx.zeros((2, 2, 3, 4)) for _ in range(2)))
    assert not may_be_in_place([window]) and not may_be_in_place([batch(), window])
    assert not may_be_in_place([BatchKVCache([0, 0])]), "nothing is written yet"
    assert not may_be_in_place(ragged([window]))
    if not on_cuda():
        plain = BatchKVCache([0, 0])
        plain.update_and_fetch(*(mx.zeros((2, 2, 3, 64)) for _ in range(2)))
        rotary = Rotary(64, 1.0, 1e4)
        assert not place.is_for([plain], 1, {mx.float32}, rotary), "on another back end"


@needs_cuda
def test_attention_in_place() -> None:
    """As by its definition: of rows with padding, of one stretch and of several, some behind where others end."""
    for dtype, size, heads, kv_heads, at_once in (
        (mx.bfloat16, 128, 16, 8, 1),
        (mx.bfloat16, 128, 8, 2, 6),
        (mx.bfloat16, 128, 16, 8, cuda_attention.MOST_QUERIES),
        (mx.float16, 64, 14, 2, 1),
        (mx.float16, 64, 6, 2, 5),
        (mx.float32, 256, 6, 2, 2),
    ):
        for end, room, behind in product((64, 300, 1500), (2048,), (0, 3)):
            queries = drawn(3, heads, at_once, size, dtype=dtype)
            keys, values = (drawn(3, kv_heads, room, size, dtype=dtype) for _ in range(2))
            mask = seen_by(end, at_once)
            padding = [0, end // 3, end - at_once]
            ends = [end - behind, end, end]
            offset = mx.array([last - at_once - each for last, each in zip(ends, padding, strict=True)])
            out = cuda_attention.attention_in_place(queries, (keys, values), SCALE, (offset, mx.array(padding)))
            for row, last in enumerate(ends):
                seen = mask[row : row + 1, ..., end - last :] if last < end else mask[row : row + 1]
                part = slice(row, row + 1)
                close = wanted(queries[part], keys[part, :, :last], values[part, :, :last], seen)
                made = out.reshape(3, at_once, heads, size)[part].swapaxes(1, 2).astype(mx.float32)
                assert mx.allclose(made, close, atol=2e-2 if dtype != mx.float32 else 1e-5)


@needs_cuda
def test_attention_in_packed_place() -> None:
    """As over plain KV that holds what was packed."""
    for bits, group_size, dtype, size, heads, kv_heads, at_once in (
        (8, 64, mx.bfloat16, 128, 32, 8, 1),
        (8, 64, mx.bfloat16, 64, 8, 2, 3),
        (8, 32, mx.float32, 128, 4, 4, 1),
        (4, 64, mx.bfloat16, 128, 16, 8, 1),
        (4, 128, mx.float16, 256, 4, 2, 5),
    ):
        packing, room = Packing(bits, group_size, dtype, "packed"), 1024
        for end in (64, 1000):
            queries = drawn(3, heads, at_once, size, dtype=dtype)
            packed = [packing.pack(drawn(3, kv_heads, room, size, dtype=dtype)) for _ in range(2)]
            keys, values = (packing.unpack(each, size)[..., :end, :] for each in packed)
            padding = mx.array([0, end // 3, end - at_once])
            rows = end - at_once - padding, padding
            out = cuda_attention.attention_in_place(queries, packed, SCALE, rows, bits, group_size)
            made = out.reshape(3, at_once, heads, size).swapaxes(1, 2).astype(mx.float32)
            close = wanted(queries, keys, values, seen_by(end, at_once))
            assert mx.allclose(made, close, atol=2e-2 if dtype != mx.float32 else 1e-4)


@needs_cuda
@pytest.mark.parametrize("packing", [None, Packing(8, 64, mx.bfloat16), Packing(4, 32, mx.bfloat16)], ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_keys_and_values_are_written_where_their_row_ends(normed: bool, packing: Packing | None) -> None:
    heads, size, rotary = (4, 2, 2), 128, Rotary.of(nn.RoPE(128), 128)
    assert rotary is not None
    norms = [drawn(size), drawn(size)] if normed else []
    for count in (1, 3):
        qkv, offset, padding = drawn(3 * count, 8 * size), mx.array([0, 7, 200]), mx.array([5, 0, 50])
        kv = [drawn(3, 2, 256, size) for _ in range(2)]
        q, *new = rotary(qkv, heads, norms, 1e-6, offset)
        if packing is not None:
            kv, new = ([packing.pack(each) for each in part] for part in (kv, new))
        copies = [each + 0 for each in kv]
        mx.eval(copies, kv)
        assert mx.array_equal(rotary.placed(qkv, heads, norms, 1e-6, (offset, padding), kv, packing), q)
        for held, copy, each in zip(kv, copies, new, strict=True):
            for row, at in enumerate((5, 7, 250)):
                copy[row, :, at : at + count] = each[row]
            assert mx.array_equal(held, copy), "there, and nowhere else"


def test_what_is_not_drawn_from_is_not_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a prompt may be one token wide: nobody asks for its logits, without which its KV would not come."""
    loaded = load_model(EngineConfig(str(write_model(tmp_path / "m", QWEN3_BENCH))))
    asked: list[tuple[tuple[int, ...], bool]] = []
    reads = DecodeStep._reads

    def noted(step: DecodeStep, tokens_BL: mx.array, caches: Any, in_place: bool) -> Any:
        asked.append((tokens_BL.shape, in_place))
        return reads(step, tokens_BL, caches, in_place)

    monkeypatch.setattr(DecodeStep, "_reads", noted)
    engine = Engine(loaded, EngineConfig("", max_rows=8, prefix_cache_bytes=64 << 20, prefill_chunk=64))
    for at, length in enumerate((64, 66, 66)):  # the second has a piece of one token, of 64 and more, or behind a hit
        prompt = (*range(3, 3 + 64), *range(100 + at, 100 + at + length - 64))
        engine.submit([RowRequest(SequenceSpec(str(at), "m", prompt, SamplingParams(4, at, ignore_eos=True)))])
        while engine.busy:
            engine.turn()
            engine.settle()
    engine.close()
    pieces = [shape for shape, in_place in asked if not in_place]
    assert pieces and set(pieces) == {(1, 1)}
    assert sum(in_place for _, in_place in asked) >= 3 * 4, "each token that is drawn"


PROMPTS = [
    tuple((at * 31 + row * 7) % 250 for at in range(length)) for row, length in enumerate((70, 9, 130, 41, 70, 514))
]
PROMPTS.append((*PROMPTS[0][:64], 7, 9))  # behind the others' blocks one token is left before the last, and of 514


def said(loaded: LoadedModel, guesses: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """What rows say that come and go, some twice, some of one prompt, some with drafts."""
    speculation = SpeculationConfig(5, adapts_to_time=False, own_text=False)
    engine = Engine(
        loaded, EngineConfig("", max_rows=8, prefix_cache_bytes=64 << 20, prefill_chunk=512, speculation=speculation)
    )
    told: dict[str, list[int]] = {}

    def submit(round_: int) -> None:
        for at, prompt in enumerate(PROMPTS):
            name = f"{round_} {at}"
            sampling = SamplingParams(20 + 40 * (at % 3) + 250 * (at == 1), at, temperature=1.0, ignore_eos=True)
            told[name] = []
            spec = SequenceSpec(name, "m", prompt, sampling, prediction_ids=guesses.get(name, ()))
            engine.submit([RowRequest(spec)])

    for turn in range(2000):
        if turn in (0, 15, 60):
            submit(turn)
        if turn == 30:
            engine.cancel("15 1")
        for event in engine.turn().events:
            told[event.seq] += event.tokens
        engine.settle()
        if turn > 60 and not engine.busy:
            break
    engine.close()
    told.pop("15 1")  # how far it has come depends on drafts
    return told


@needs_cuda
@pytest.mark.parametrize("bits", [0, 8])
def test_rows_come_and_go_and_are_taken_back_in_place(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(EngineConfig(str(write_model(tmp_path / "m", QWEN3_BENCH)), kv_bits=bits))
    steps = 0
    is_for = place.is_for

    def counted(*of: Any) -> bool:
        nonlocal steps
        steps += (taken := is_for(*of))
        return taken

    monkeypatch.setattr(place, "is_for", lambda *of: False)
    plain = said(loaded, {})
    guesses = {name: tuple(id_ if at % 4 else 0 for at, id_ in enumerate(ids)) for name, ids in plain.items()}
    monkeypatch.setattr(place, "is_for", counted)
    for drafts in ({}, {name: each for name, each in guesses.items() if name[-1] in "013"}):
        assert said(loaded, drafts) == plain
    assert steps > 200


CHAINS = st.lists(st.sampled_from([(), (0,), (0, 1), (0, 2), (0, 2, 3), (4,)]), min_size=1, max_size=9)


@given(
    chains=CHAINS.filter(any),
    lengths=st.lists(st.sampled_from([1, 63, 128, 257, 600, 1500]), min_size=5, max_size=5),
    own=st.sampled_from([256, 1024]),
    heads=st.sampled_from([1, 4, 7, 17]),
    count=st.sampled_from([1, 3]),
    kv_heads=st.sampled_from([1, 8]),
)
@settings(max_examples=60, deadline=None)
def test_blocks_read_each_position_once_and_fill_each_slot(
    chains: list[tuple[int, ...]], lengths: list[int], own: int, heads: int, count: int, kv_heads: int
) -> None:
    """As `tiles.cu` does with them: each query of a row reads all of the row's beginnings, and its own positions."""
    groups, queries = Groups(tuple(chains)), heads * count
    ends = dict(zip(groups.keys, accumulate(lengths[cast(int, key)] for key in groups.keys), strict=True))
    held = {key: (mx.zeros((1, kv_heads, lengths[cast(int, key)], 4)),) * 2 for key in groups.keys}
    rows = RaggedKVCache([0] * len(chains))
    rows.state = *(mx.zeros((len(chains), kv_heads, 1, 4)) for _ in range(2)), mx.array([1]), mx.array([0]), 1
    slots, begun_B, (blocks, members) = blocks_of(SharedKVCache(rows, groups, held), own, queries)
    rows_of, filled = members.tolist(), Counter[tuple[int, int, int]]()
    read = {(row, query): Counter[int]() for row in range(len(chains)) for query in range(queries)}
    own_stretches = {row: Counter[int]() for row in range(len(chains))}
    for stretches, begin, end, first, many, query, slot, of_all in blocks.tolist():
        assert not many or of_all == slots
        for at in range(query, min(query + cuda_attention.TILED_QUERIES, many * queries)):
            row, of_row = rows_of[first + at // queries], at % queries
            filled[row, of_row, slot] += 1
            if stretches:
                assert many == 1
                own_stretches[row][begin] += of_row == 0
            else:
                read[row, of_row].update(range(begin, end))
    assert set(filled) == {(*key, slot) for key in read for slot in range(slots)} and set(filled.values()) == {1}
    assert {tuple(sorted(each.items())) for each in own_stretches.values()} == {
        tuple((part, 1) for part in range(len(own_stretches[0])))
    }
    assert begun_B.tolist() == [sum(lengths[key] for key in chain) for chain in chains]
    for (row, _), positions in read.items():
        wanted = [at for key in chains[row] for at in range(ends[key] - lengths[key], ends[key])]
        assert positions == Counter(wanted)


def test_beginnings_lie_in_one_line_and_keep_nothing_else() -> None:
    def pair(length: int) -> tuple[mx.array, mx.array]:
        return mx.random.normal((1, 2, length, 4)), mx.random.normal((1, 2, length, 4))

    own = RaggedKVCache([0, 0, 0])
    own.state = *(mx.zeros((3, 2, 4, 4)) for _ in range(2)), mx.array([4, 4, 4]), mx.array([0, 0, 0]), 4
    held = {"a": pair(300), "b": pair(40)}
    leaf = SharedKVCache(own, Groups((("a",), ("a", "b"), ())), {**held})
    under_way = leaf.begun([("a", 300)], Groups((("a",),)))
    for at, line in enumerate(leaf.in_line()):
        assert line.shape == (1, 2, 512, 4)
        assert mx.array_equal(line[:, :, :340], mx.concatenate([held["a"][at], held["b"][at]], axis=2))
        assert mx.array_equal(leaf.beginnings["b"][at], held["b"][at])
    assert leaf.in_line()[0] is leaf.in_line()[0], "copied when something has changed only"
    leaf.keep_rows([0])
    assert leaf.in_line()[0].shape == (1, 2, 512, 4) and list(leaf.beginnings) == ["a"]
    assert under_way.beginnings["a"][0] is leaf.beginnings["a"][0], "not what it was cut from before"
    under_way.beginnings.clear()
    mx.eval(leaf.in_line())
    mx.synchronize()  # a GPU's operations hold what they have read until then
    before = mx.get_active_memory()
    leaf.keep_rows([])
    assert mx.get_active_memory() <= before - 2 * 2 * 512 * 4 * 4, "nothing of them is left"


def test_what_is_written_in_place_lies_in_order_behind_a_beginning() -> None:
    """The kernel that writes counts by rows and heads; of a longer array's end they would lie further apart."""
    leaf = RaggedKVCache([0, 0])  # 64 positions of a prefix cache, and then as many as an update made room for
    leaf.state = *(mx.zeros((2, 2, 64 + 256, 4)) for _ in range(2)), mx.array([70, 70]), mx.array([0, 0]), 70
    together, _ = shared([leaf], [[("", 64)]] * 2, [0, 0])
    for pair in with_room(together, 1):
        mx.eval(pair)
        assert all(memoryview(each).c_contiguous for each in pair)  # type: ignore[arg-type]


@needs_cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_with_beginnings_in_common_are_read_in_place(
    head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and rows alone, of a system prompt and without it, that come, go and are taken back: as MLX computes."""
    loaded = load_model(EngineConfig(str(write_model(tmp_path / "m", QWEN3_BENCH | {"head_dim": head_dim}))))
    loaded.model.update(tree_map(lambda each: each.astype(mx.bfloat16), loaded.model.parameters()))
    taken, is_for = set[tuple[int, int]](), place.is_for

    def noted(caches: Any, count: int, *of: Any) -> bool:
        is_taken = is_for(caches, count, *of)
        if is_taken and isinstance(caches[0], SharedKVCache):
            taken.add((count, len({len(chain) for chain in caches[0].groups.chains})))
        return is_taken

    monkeypatch.setattr(place, "is_for", noted)
    prompts = {"a": PROMPTS[5], "b": (*PROMPTS[5][:256], *PROMPTS[2]), "c": PROMPTS[2], "": PROMPTS[1]}
    guesses: dict[str, tuple[int, ...]] = {}
    for turn_of_second in (0, 25):
        config = SpeculationConfig(5, adapts_to_time=False, own_text=False)
        engine = Engine(loaded, EngineConfig("", max_rows=16, share_prompts="always", speculation=config))
        said: dict[str, list[int]] = {}
        logprobs: dict[str, list[float]] = {}
        for turn in range(2000):
            if turn in (0, turn_of_second + 1):
                for name in ("ab", "c")[turn > 0]:
                    for at in range(4):
                        of = SamplingParams(30 + 60 * at, at, temperature=1.0, ignore_eos=True)
                        drafts = guesses.get(name + str(at), ())
                        spec = SequenceSpec(name + str(at), "m", prompts[name], of, group=name, prediction_ids=drafts)
                        engine.submit([RowRequest(spec)])
                engine.submit([RowRequest(SequenceSpec(f"{turn}", "m", prompts[""], SamplingParams(99, turn)))])
            for event in engine.turn().events:
                said.setdefault(event.seq, []).extend(event.tokens)
                logprobs.setdefault(event.seq, []).extend(event.logprobs)
            engine.settle()
            if turn > 50 and not engine.busy:
                break
        engine.close()
        for seq, tokens in said.items():
            ids = [*prompts.get(seq[:1], prompts[""]), *tokens]
            rows = loaded.model(mx.array([ids[:-1]]))[0, -len(tokens) :].astype(mx.float32)
            wanted_N = mx.take_along_axis(nn.log_softmax(rows), mx.array(tokens)[:, None], axis=-1)[:, 0]
            apart = mx.abs(wanted_N - mx.array(logprobs[seq]))
            assert apart.mean().item() < 0.05 and apart.max().item() < 0.5, seq
        guesses = {seq: tuple(id_ if at % 4 else 0 for at, id_ in enumerate(ids)) for seq, ids in said.items()}
    assert any(kinds > 1 for _, kinds in taken), "rows with one beginning, with two, without"
    assert any(count > 1 for count, _ in taken), "drafts"
