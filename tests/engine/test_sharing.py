"""KV that one engine gives to another: the row goes on as if it had never moved, and what does not fit is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.generate import generation_stream

from mlx_model.loader import LoadedModel
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.kv_models import small
from worker.engine.prefixes.parcels import KvParcel, UnusableParcelError, pack, unpack
from worker.engine.prefixes.sharing import OfferedKv, SharedCache

T = TypeVar("T")
BLOCK = 16


def bench(loaded: LoadedModel) -> Bench:
    return Bench(loaded, block_size=BLOCK)


def offered(cache: SharedCache, ids: list[int], at_most: int, known: int = 0, blocks: int = 0) -> OfferedKv | None:
    return cache.offer(ids, "", known, blocks, at_most, 1 << 30)


def parcels(giver: SharedCache, offer: OfferedKv) -> list[KvParcel]:
    """As they come out of the bytes that go over the wire."""
    given = []
    for at in range(len(offer.sizes)):
        giver.begin(offer.number, at)
        packed = pack(giver.finish(offer.number, at))
        given.append(unpack(b"".join([packed.head, *packed.parts]), giver.identity))
    giver.drop(offer.number)
    return given


def on_kv(bench: Bench, call: Callable[[SharedCache], T]) -> T:
    with mx.stream(generation_stream):
        return call(bench.engine.prefixes)


def moved(giver: Bench, taker: Bench, ids: list[int]) -> int:
    """Let one have what the other has of these ids; the length that a hit has then."""
    offer = on_kv(giver, lambda cache: offered(cache, ids, len(ids) - 1))
    assert offer is not None
    for parcel in on_kv(giver, lambda cache: parcels(cache, offer)):
        on_kv(taker, lambda cache, parcel=parcel: cache.take(cache.held(ids, "", 0), parcel))
    assert on_kv(taker, lambda cache: cache.known(ids, "", len(ids) - 1)) == offer.length
    return offer.length


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "llama 8", "gemma3_text", "qwen3_5", "deepseek_v3", "mamba2"])
@pytest.mark.parametrize("length", [70, 20])
def test_a_row_goes_on_in_another_engine_with_the_kv_of_the_first(name: str, length: int, llama: LoadedModel) -> None:
    loaded = small(name, llama)
    each = spec("s", prompt_of(length), max_tokens=40)
    whole = bench(loaded)
    whole.submit(each)
    whole.run()
    first, second = bench(loaded), bench(loaded)
    first.submit(each, spec("beside", prompt_of(33, 1), max_tokens=40))
    first.until(lambda: len(first.tokens("s")) > 20)
    first.engine.set_aside(["s", "beside"])
    first.turn()
    prior = tuple(first.events["s"])
    ids = [*each.prompt_ids, *first.tokens("s")]
    read = moved(first, second, ids)
    is_cut = name in ("llama", "llama 8", "deepseek_v3")
    assert read == ((len(ids) - 1) // BLOCK * BLOCK if is_cut else len(ids) - 1), "computed again"
    second.submit(each, prior=prior, attempt=2)
    second.run()
    assert first.tokens("s") + second.tokens("s") == whole.tokens("s")
    assert second.finish("s").cached_tokens == min(read, length)


@pytest.mark.parametrize("name", ["llama 8", "deepseek_v3"])
def test_rows_behind_nested_beginnings_go_on_in_another_engine(name: str, llama: LoadedModel) -> None:
    """Two groups with 64 ids in common, and a row alone; there they share beginnings again."""
    loaded, system = small(name, llama), prompt_of(64)
    prompts = {"a": [*system, *prompt_of(20, 1)], "b": [*system, *prompt_of(9, 2)], "": [*system, *prompt_of(30, 3)]}
    specs = [
        spec(f"{group}{n}", ids, group=group, seed=n, temperature=n % 2, max_tokens=40)
        for group, ids in prompts.items()
        for n in range(2 if group else 1)
    ]
    whole = bench(loaded)
    whole.submit(*specs)
    whole.run()
    first, second = (Bench(loaded, block_size=BLOCK, share_prompts="always") for _ in range(2))
    first.submit(*specs)
    first.until(lambda: all(len(first.tokens(each.id)) > 10 for each in specs))
    assert first.engine.batch.spared >= 4 * len(system)
    first.engine.set_aside([each.id for each in specs])
    first.turn()
    for each in specs:
        ids = [*each.prompt_ids, *first.tokens(each.id)]
        assert moved(first, second, ids) == (len(ids) - 1) // BLOCK * BLOCK
    for each in specs:
        second.submit(each, prior=tuple(first.events[each.id]), attempt=2)
    second.until(lambda: second.engine.batch.decoding == len(specs))
    assert second.engine.batch.spared >= 4 * len(system)
    second.run()
    for each in specs:
        assert first.tokens(each.id) + second.tokens(each.id) == whole.tokens(each.id), each.id


def test_what_is_set_aside_is_told_and_nothing_is_computed_after_it(llama: LoadedModel) -> None:
    first = bench(llama)
    first.submit(spec("s", prompt_of(40), max_tokens=500), spec("long", prompt_of(900, 1)))
    first.until(lambda: len(first.tokens("s")) > 3)
    first.engine.set_aside(["s", "long", "unknown"])
    first.turn()
    told = len(first.tokens("s"))
    first.turn()
    assert len(first.tokens("s")) == told and first.engine.stats().rows == 0
    fed = on_kv(first, lambda cache: cache.known(prompt_of(900, 1), "", 899))
    assert 0 < fed < 899, "of a prompt that was half fed, that half"


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "llama 8", "llama last-24", "gemma3_text", "qwen3_5", "mamba2"])
def test_a_row_that_made_room_comes_back_to_its_kv(name: str, llama: LoadedModel) -> None:
    loaded = small(name, llama)
    one, beside = spec("s", prompt_of(70), max_tokens=60), spec("beside", prompt_of(33, 1), max_tokens=60)
    group = [spec(f"g{at}", prompt_of(50, 2), group="g", temperature=1.0, seed=at, max_tokens=60) for at in range(2)]
    whole, torn = bench(loaded), bench(loaded)
    for each in (whole, torn):
        each.submit(one, beside, *group)
    whole.run()
    torn.until(lambda: len(torn.tokens("s")) > 20)
    torn.engine.set_aside(["s", "g0"])
    torn.turn()
    before = {seq: tuple(torn.events.pop(seq)) for seq in ("s", "g0")}
    torn.turn()
    assert not {"s", "g0"} & set(torn.events) and torn.engine.stats().rows == 2
    known = torn.engine.stats().prefix.hit_tokens
    for each in (one, group[0]):
        torn.submit(each, prior=before[each.id], attempt=2)
    torn.run()
    found = torn.engine.stats().prefix.hit_tokens - known
    lengths = [
        len(each.prompt_ids) + sum(len(event.tokens) for event in before[each.id]) - 1 for each in (one, group[0])
    ]
    is_cut = torn.engine.prefixes.needs_snapshots is False
    assert found == sum(length // BLOCK * BLOCK if is_cut else length for length in lengths), (
        "the rest is computed again"
    )
    for seq, events in before.items():
        told = [token for event in events for token in event.tokens]
        assert told + torn.tokens(seq) == whole.tokens(seq)
    assert [torn.tokens(seq) for seq in ("beside", "g1")] == [whole.tokens(seq) for seq in ("beside", "g1")]


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_others_whose_first_token_is_told_then_leave_their_prompt_all_the_same(turns: int, llama: LoadedModel) -> None:
    torn = bench(llama)
    torn.submit(spec("s", prompt_of(70), max_tokens=60))
    torn.until(lambda: len(torn.tokens("s")) > 20)
    torn.submit(msgspec.structs.replace(spec("job", prompt_of(50, 1), max_tokens=9), sequence_class="batch"))
    for _ in range(turns):
        torn.turn()
    torn.engine.set_aside(["s"])
    torn.run()
    assert on_kv(torn, lambda cache: cache.known(prompt_of(50, 1), "", 49)) == 3 * BLOCK


@pytest.mark.parametrize("clear_cache", [False, True])
def test_rows_that_a_pause_sends_back_leave_their_kv_unless_it_is_to_be_forgotten(
    clear_cache: bool, llama: LoadedModel
) -> None:
    paused = bench(llama)
    paused.submit(one := spec("s", prompt_of(70), max_tokens=60))
    paused.until(lambda: len(paused.tokens("s")) > 20)
    paused.engine.freeze(clear_cache=clear_cache)
    paused.engine.set_aside(["s"])
    paused.turn()
    assert not paused.engine.has_rows
    ids = [*one.prompt_ids, *paused.tokens("s")]
    known = on_kv(paused, lambda cache: cache.known(ids, "", len(ids) - 1))
    assert known == (0 if clear_cache else (len(ids) - 1) // BLOCK * BLOCK)


def test_only_what_the_other_lacks_is_offered_and_only_what_it_has_room_for(llama: LoadedModel) -> None:
    ids = prompt_of(10 * BLOCK)
    one = bench(llama)
    one.submit(spec("s", ids))
    one.run()
    cache = one.engine.prefixes
    whole = offered(cache, ids, len(ids) - 1)
    rest = offered(cache, ids, len(ids) - 1, known=6 * BLOCK, blocks=6)
    assert whole and rest and sum(rest.sizes) < sum(whole.sizes)
    assert [key for parcel in parcels(cache, rest) for key in parcel.label.keys] == [
        key for parcel in parcels(cache, whole) for key in parcel.label.keys
    ][6:]
    assert offered(cache, ids, len(ids) - 1, known=len(ids) - 1, blocks=10) is None
    assert cache.offer(ids, "policy@1", 0, 0, len(ids) - 1, 1 << 30) is None, "another version's"
    assert cache.offer(ids, "", 0, 0, len(ids) - 1, 10) is None, "no room for a byte of it"
    assert offered(cache, prompt_of(10 * BLOCK, 1), len(ids) - 1) is None


def test_a_long_prompt_goes_in_parcels_of_bounded_size(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    block = BLOCK * llama.card.kv_bytes_per_token
    monkeypatch.setattr("worker.engine.prefixes.sharing.PIECE_BYTES", 3 * block)
    monkeypatch.setattr("worker.engine.prefixes.sharing.PROBE_BYTES", 1)
    ids = prompt_of(10 * BLOCK)
    one, other = bench(llama), bench(llama)
    one.submit(spec("s", ids))
    one.run()
    assert moved(one, other, ids) == len(ids) - 1
    offer = on_kv(one, lambda cache: offered(cache, ids, len(ids) - 1))
    assert offer and sum(offer.sizes) == 10 * block and max(offer.sizes) == 3 * block
    assert offer.sizes[0] == block, "the first one is small: the others are judged by it"


def test_what_is_not_of_the_prompt_or_of_another_layout_is_not_stored(llama: LoadedModel) -> None:
    ids = prompt_of(4 * BLOCK)
    one, other = bench(llama), bench(llama)
    one.submit(spec("s", ids))
    one.run()
    offer = on_kv(one, lambda cache: offered(cache, ids, len(ids) - 1))
    assert offer
    (parcel, *_) = on_kv(one, lambda cache: parcels(cache, offer))
    cache = other.engine.prefixes
    label, leaf = parcel.label, parcel.cut[0]
    for wrong in (
        replace(parcel, cut=parcel.cut[1:]),
        replace(parcel, cut=[tuple(replace(array, shape=array.shape[::-1]) for array in leaf), *parcel.cut[1:]]),
        replace(parcel, states=parcel.cut),
        replace(parcel, label=type(label)("others", label.keys)),
        replace(parcel, label=type(label)(label.identity, label.keys, "policy@1")),
        replace(parcel, label=type(label)(label.identity, (b"x" * 16, *label.keys[1:]))),
        replace(parcel, label=type(label)(label.identity, label.keys, tail=(1, 2), length=2)),
        replace(parcel, label=type(label)(label.identity, ())),
    ):
        with pytest.raises(UnusableParcelError):
            cache.take(cache.held(ids, "", 0), wrong)
        with pytest.raises(UnusableParcelError):
            cache.take(cache.held(prompt_of(4 * BLOCK, 9), "", 0), parcel)
    assert cache.stats.blocks == 0
    cache.take(cache.held(ids, "", 0), parcel)
    assert cache.stats.blocks == len(label.keys)
