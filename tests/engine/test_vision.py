"""Rows with images in the batch: the tokens of mlx-vlm alone, and never another image's KV."""

import random
import threading
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from tests.waiting import HANG_S

pytest.importorskip("mlx_vlm")

from mlx_model.config import DiskConfig, EngineConfig, SpeculationConfig
from mlx_model.kv.kinds import kind_of, leaves
from mlx_model.loader import LoadedModel, load_model
from mlx_model.vision.positions import Grid, Spots
from mlx_model.vision.qwen import QwenTower
from shared.errors import EngineError
from tests.engine.adapter_bench import AdapterBench
from tests.engine.adapter_models import make_adapter
from tests.engine.test_sharing import moved
from tests.engine.vision_bench import Gaze
from tests.engine.vision_models import (
    CONFIGS,
    IMAGE_TOKEN_ID,
    WHAT,
    alone,
    behind,
    image_spec,
    picture,
    pixels,
    whole_model,
    write_vision_model,
)
from worker.engine import album, gallery
from worker.engine.gallery import TRIED_AGAIN, Gallery, TileTimes, Viewing
from worker.engine.messages import RowRequest
from worker.engine.prefixes.disk.folder import Folder
from worker.engine.turns import ImagePiece


@pytest.fixture(scope="module")
def seeing(family: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_vision_model(tmp_path_factory.mktemp("models") / family, family)
    return load_model(EngineConfig(str(folder)))


@pytest.fixture(scope="module")
def reference(family: str) -> Any:
    model = whole_model(family)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module", params=sorted(CONFIGS.keys() - {"qwen3_vl_moe"}))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def is_cut(loaded: LoadedModel) -> bool:
    return all(kind_of(leaf).is_cut for leaf in leaves(loaded.kv.new(loaded.model)))


def test_as_many_tiles_are_encoded_at_once_as_stay_in_time() -> None:
    times = TileTimes()
    assert times.most(8, 1.0) == 1, "nothing is known"
    for tiles, seconds in ((1, 9.0), (1, 0.5), (2, 60.0)):  # kernels are compiled in the first one of each
        times.took(tiles, seconds)
    assert times.most(8, 1.0) == 2, "once may have been that"
    times.took(2, 0.5)
    assert times.most(8, 1.0) == 4 and times.most(3, 1.0) == 2
    times.took(4, 1.5)
    times.took(4, 1.5)
    assert times.most(8, 1.0) == 2 and times.most(8, 2.0) == 8 and times.most(8, 0.1) == 1
    for _ in range(TRIED_AGAIN):
        times.took(2, 0.5)
    assert times.most(8, 1.0) == 4, "the machine may have been busy"


def test_positions_are_those_of_mlx_vlm_wherever_a_prompt_is_cut() -> None:
    dice, model = random.Random(17), whole_model("qwen2_5_vl")
    for _ in range(20):
        grids = [Grid(dice.randint(1, 5), dice.randint(1, 5)) for _ in range(dice.randint(1, 3))]
        ids: list[int] = []
        for rows, columns in grids:
            ids += [*[5] * dice.randint(0, 3), IMAGE_TOKEN_ID + 1, *[IMAGE_TOKEN_ID] * (rows * columns)]
        ids += [5] * dice.randint(1, 9)
        spots = Spots(len(ids), [at for at, each in enumerate(ids) if each == IMAGE_TOKEN_ID], grids)
        thw = mx.array([[1, 2 * rows, 2 * columns] for rows, columns in grids])
        theirs_31L, shift = model.language_model.get_rope_index(mx.array([ids]), thw)
        first, last = sorted(dice.sample(range(len(ids) + 1), 2))
        assert (spots.piece(first, last - first) == np.array(theirs_31L)[:, 0, first:last]).all()
        behind = len(ids) + spots.shift + np.arange(2)
        assert spots.shift == shift.item() and (spots.piece(len(ids) - 1, 3)[:, 1:] == behind).all()
    with pytest.raises(EngineError, match="one piece"):
        Spots(9, [1, 2, 4, 5], [Grid(2, 2)])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_vectors_are_mlx_vlms_in_whatever_pieces_an_image_is_encoded(
    seeing: LoadedModel, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = seeing.tower
    assert isinstance(tower, QwenTower)
    for pairs, width, height in ((1 << 27, 48, 64), (100, 80, 48), (1, 16, 32)):
        monkeypatch.setattr(tower, "most_pairs", pairs)
        shown = picture(1, width, height)
        *pieces, vectors_TH = tower.layers(shown.tobytes(), width, height)
        fed = pixels(reference, [shown])
        theirs = reference.vision_tower(fed["pixel_values"], fed["image_grid_thw"])
        theirs_TH = mx.concatenate([theirs[0], *theirs[1]], axis=-1) if isinstance(theirs, tuple) else theirs
        assert mx.abs(vectors_TH - theirs_TH).max().item() < 1e-4
        assert len(pieces) >= (4 if pairs > 1000 else 8)


@pytest.mark.long
def test_what_it_says_depends_on_the_image(seeing: LoadedModel, reference: Any) -> None:
    bench = Gaze(seeing)
    for seed in range(6):
        bench.ask(f"s{seed}", WHAT, [picture(seed)])
    bench.run()
    bench.check(reference)
    assert len({tuple(bench.tokens(f"s{seed}")) for seed in range(6)}) > 3


@pytest.mark.long
@pytest.mark.parametrize("chunk", [5, 64])
def test_tokens_are_mlx_vlms_among_text_rows_that_join_and_leave(
    seeing: LoadedModel, reference: Any, chunk: int
) -> None:
    bench = Gaze(seeing, prefill_chunk=chunk)
    bench.ask("text", "Tell me of the sea and of the ships on it, " * 3, max_tokens=30)
    bench.ask("one", WHAT, [picture(1, 60, 60)], max_tokens=12)
    bench.until(lambda: len(bench.tokens("text")) > 3)
    bench.ask("three", "<image> and <image>, then <image>: which?", [picture(2), picture(3, 20, 64), picture(4, 9, 9)])
    bench.ask("short", "And you?", max_tokens=2)
    bench.ask("gone", WHAT, [picture(5)], max_tokens=50)
    bench.until(lambda: len(bench.tokens("gone")) > 2)
    bench.engine.cancel("gone")
    bench.ask("two", "<image>\n<image> Compare.", [picture(6), picture(1, 60, 60)], max_tokens=20)
    bench.run()
    assert bench.finish("gone").reason == "cancelled"
    bench.check(reference, "text", "one", "three", "short", "two")


def test_another_image_with_the_same_text_never_hits(seeing: LoadedModel, reference: Any) -> None:
    text = "A long beginning that fills some blocks of the cache. <image> And a long end, of which there are many."
    bench = Gaze(seeing)
    bench.ask("first", text, [picture(1)])
    bench.run()
    before = text.index("<image>") // 16 * 16
    bench.ask("same", text, [picture(1)])
    bench.ask("other", text, [picture(2)])
    bench.run()
    bench.ask("low", text, [picture(1)], detail="low")
    bench.run()
    assert bench.finish("same").cached_tokens > before + 16
    assert bench.finish("low").cached_tokens == before
    missed = {before} if is_cut(seeing) else {0}  # layers that cannot be cut are kept there once two rows go apart
    assert bench.finish("other").cached_tokens in missed
    bench.check(reference, "first", "same", "other")
    assert bench.engine.stats().vision.encoded == 3


def test_what_is_not_to_be_cached_leaves_no_vectors(seeing: LoadedModel, reference: Any) -> None:
    bench = Gaze(seeing)
    for seq in ("one", "two"):
        bench.ask(seq, WHAT, [picture(1)], cache=False)
    bench.run()
    assert (bench.engine.stats().vision.encoded, bench.engine.stats().vision.bytes) == (1, 0)
    bench.ask("private", WHAT, [picture(1)], cache=False)
    bench.ask("normal", WHAT, [picture(1)])
    bench.run()
    assert bench.engine.stats().vision.bytes > 0, "another row wants them, too"
    bench.check(reference)


def test_samples_of_one_group_share_the_image_and_another_image_is_another_group(
    seeing: LoadedModel, reference: Any
) -> None:
    bench = Gaze(seeing)
    for sample in range(4):
        bench.ask(f"s{sample}", WHAT, [picture(1)], group="g")
    bench.ask("other", WHAT, [picture(2)], group="g")
    bench.run()
    bench.check(reference)
    assert bench.engine.stats().vision.encoded == 2


def test_a_row_that_is_taken_over_goes_on_with_its_image(seeing: LoadedModel, reference: Any) -> None:
    first = Gaze(seeing)
    first.ask("s", WHAT, [picture(3)], max_tokens=20)
    first.until(lambda: len(first.tokens("s")) > 6)
    second, (spec, _) = Gaze(seeing), first.shown["s"]
    assert seeing.card.vision is not None
    _, sent = image_spec("s", seeing.card.vision, WHAT, [picture(3)])
    second.engine.submit([RowRequest(spec, 2, tuple(first.events["s"]), sent)])
    second.run()
    said = first.tokens("s") + second.tokens("s")
    assert said == alone(reference, spec.prompt_ids, [picture(3)], 20)


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_kv_of_an_image_goes_on_at_a_peer_and_another_image_finds_none_of_it(
    seeing: LoadedModel, reference: Any
) -> None:
    text = "Look at this one: <image> It is large, and much may be said of it before the end."
    first, second = Gaze(seeing), Gaze(seeing)
    first.ask("s", text, [picture(1, 64, 64)], max_tokens=40)
    first.until(lambda: len(first.tokens("s")) > 20)
    first.engine.set_aside(["s"])
    first.turn()
    (spec, shown), vision = first.shown["s"], seeing.card.vision
    assert vision is not None
    read = moved(first, second, [*spec.kv_prompt, *first.tokens("s")])
    _, sent = image_spec("s", vision, text, shown)
    second.engine.submit([RowRequest(spec, 2, tuple(first.events["s"]), sent)])
    second.ask("other", text, [picture(2, 64, 64)], max_tokens=12)
    second.run()
    assert first.tokens("s") + second.tokens("s") == alone(reference, spec.prompt_ids, shown, 40)
    assert read > len(spec.prompt_ids) and second.finish("s").cached_tokens == len(spec.prompt_ids)
    assert second.finish("other").cached_tokens == text.index("<image>") // 16 * 16
    second.check(reference, "other")


def test_few_kept_images_are_encoded_again(seeing: LoadedModel, reference: Any) -> None:
    bench = Gaze(seeing, image_cache_bytes=1, prefix_cache_bytes=0)
    for turn in range(2):
        for seed in range(3):
            bench.ask(f"{turn} {seed}", "<image> or <image>?", [picture(seed), picture(seed + 1)])
        bench.run()
    bench.check(reference)
    assert bench.engine.stats().vision.bytes == 0


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"], indirect=True)
def test_images_come_from_disk_and_damaged_files_are_encoded_again(
    seeing: LoadedModel, reference: Any, tmp_path: Path
) -> None:
    for turn, encoded in enumerate((2, 0, 1, 0)):
        bench = Gaze(seeing, disk=DiskConfig(str(tmp_path)), prefix_cache_bytes=0)
        bench.ask("one", WHAT, [picture(1)], max_tokens=12)
        bench.ask("two", WHAT, [picture(2, 64, 64)], max_tokens=12)
        bench.run()
        bench.check(reference)
        bench.engine.close()
        assert bench.engine.stats().vision.encoded == encoded, turn
        files = sorted(tmp_path.glob("*/*.safetensors"))
        assert len(files) == 2
        if turn == 1:
            data = bytearray(files[0].read_bytes())
            data[-5] ^= 1
            files[0].write_bytes(data)


@pytest.mark.parametrize("family", ["smolvlm"], indirect=True)
def test_a_disk_that_hangs_or_is_none_keeps_no_image_waiting(
    seeing: LoadedModel, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(album, "PATIENCE_S", 0.05)
    monkeypatch.setattr(Folder, "read", lambda *_: hangs.wait(HANG_S) and b"")
    made = album.Album(DiskConfig(str(tmp_path)), seeing.card, in_thread=True)
    bench = Gaze(seeing)
    bench.engine.gallery._album = made
    bench.ask("one", WHAT, [picture(1)])
    bench.run(turns=1_000_000)  # it has nothing to do until its patience is over, so turns take no time
    bench.check(reference)
    hangs.set()
    made.close()
    monkeypatch.undo()
    (tmp_path / "file").write_text("no folder")
    bench = Gaze(seeing, disk=DiskConfig(str(tmp_path / "file")), prefix_cache_bytes=0)
    bench.ask("one", WHAT, [picture(1)])
    bench.run()
    bench.check(reference)


def test_rows_that_cannot_see_are_refused_and_the_others_go_on(seeing: LoadedModel, reference: Any) -> None:
    bench, vision = Gaze(seeing), seeing.card.vision
    assert vision is not None
    good, sent = image_spec("good", vision, WHAT, [picture(1)])
    bench.shown["good"] = good, [picture(1)]
    replace = msgspec.structs.replace
    (ref,) = good.images
    last = max(at for at, each in enumerate(good.prompt_ids) if each == good.image_token)
    bad = {
        "missing": (good, ()),
        "count": (replace(good, prompt_ids=(*good.prompt_ids, good.image_token, 5)), sent),
        "foreign": (replace(good, images=(replace(ref, key=b"other"),)), sent),
        "end": (replace(good, prompt_ids=good.prompt_ids[: last + 1]), sent),
        "tokens": (replace(good, images=(replace(ref, tokens=ref.tokens + 1),)), sent),
        "broken": (replace(good, images=()), ()),
    }
    for name, (asked, pictures) in bad.items():
        bench.send(replace(asked, id=name), pictures)
    short = [replaced(sent[0], tiles=[tile[:-7] for tile in sent[0].tiles])]
    bench.send(replace(good, id="short"), tuple(short))
    bench.send(good, sent)
    bench.run()
    errors = {name: bench.finish(name).reason for name in (*bad, "short")}
    assert errors == dict.fromkeys(errors, "error") | {"broken": "length"}, "without images it is text"
    bench.ask("later", WHAT, [picture(1)])
    bench.run()
    bench.check(reference, "later")
    assert not bench.engine.gallery.wanted and not bench.engine.gallery.failed


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"], indirect=True)
def test_an_image_that_is_given_up_amid_its_pieces_comes_whole_to_all_ranks_when_it_is_wanted_anew(
    seeing: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "SENT_BYTES", 1)
    assert seeing.card.vision is not None
    spec, sent = image_spec("s", seeing.card.vision, WHAT, [picture(1, 60, 60)])
    config = EngineConfig("unused")
    ranks = [Gallery(tower, config, seeing.card, in_thread=False, by_ranks=True) for tower in (seeing.tower, None)]
    given_up, wanted = ([Viewing(spec, spec.kv_prompt) for _ in ranks] for _ in range(2))

    def look(viewings: list[Viewing]) -> None:
        for rank, viewing in zip(ranks, viewings, strict=True):
            rank.open(viewing, sent)
            rank.work(60)

    def tell(times: int) -> tuple[ImagePiece, ...]:
        pieces = ranks[0].news(times)
        for rank in ranks:
            rank.learn(pieces)
        return pieces

    look(given_up)
    (first,) = tell(1)
    assert first.total > 2 and len(first.vectors) < 1000
    late = ranks[0].news(1)
    for rank, viewing in zip(ranks, given_up, strict=True):
        assert not rank.ready(viewing), "not even on the rank that has made all of it"
        rank.close(viewing)
    look(wanted)
    for rank in ranks:
        rank.learn(late)
    while not ranks[0].ready(wanted[0]):
        assert tell(2000)
    assert ranks[1].ready(wanted[1])
    ours, theirs = (viewing.features for viewing in wanted)
    assert ours is not None and theirs is not None and mx.array_equal(ours.vectors_TH, theirs.vectors_TH)
    assert (ours.spots is None) == (theirs.spots is None) == (seeing.card.vision.family != "qwen")


@pytest.mark.long
def test_drafts_are_checked_for_rows_with_images_as_for_others(seeing: LoadedModel, reference: Any) -> None:
    bench = Gaze(seeing, speculation=SpeculationConfig(adapts_to_time=False, memory_bytes=1 << 20))
    for turn in range(2):
        for seed in range(3):
            bench.ask(f"{turn} {seed}", WHAT, [picture(seed)], max_tokens=40)
        bench.ask(f"{turn} text", "abcabcabcabcabc", max_tokens=40)
        bench.run()
    bench.check(reference)
    assert bench.engine.stats().speculation.accepted > 0


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_vl", "lfm2_vl", "gemma3"], indirect=True)
def test_what_comes_behind_an_image_goes_on_from_kv_that_was_on_disk(
    seeing: LoadedModel, reference: Any, tmp_path: Path
) -> None:
    text = "Look at this one: <image> It is large, and much may be said of it before the end."
    for turn, cached in enumerate((0, 64)):
        bench = Gaze(seeing, disk=DiskConfig(str(tmp_path)))
        bench.ask("one", text, [picture(1, 64, 64)], max_tokens=12)
        bench.run()
        bench.check(reference)
        assert bench.finish("one").cached_tokens >= cached, turn
        bench.engine.close(keep=True)


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"], indirect=True)
def test_a_model_that_drafts_has_no_eyes_and_changes_nothing(family: str, reference: Any, tmp_path: Path) -> None:
    folder = str(write_vision_model(tmp_path / "small", family))
    drafting = SpeculationConfig(draft_model=folder, adapts_to_time=False, ngram_max=0)
    loaded = load_model(EngineConfig(folder, speculation=drafting))
    bench = Gaze(loaded, speculation=drafting, prefill_chunk=8)
    bench.ask("text", "Tell me of the sea.", max_tokens=30)
    bench.ask("one", WHAT, [picture(1)], max_tokens=30)
    bench.ask("two", "<image> or <image>?", [picture(2), picture(3, 64, 20)], max_tokens=30)
    bench.run()
    bench.check(reference)
    assert bench.engine.stats().speculation.model_accepted > 5


@pytest.mark.long
def test_adapters_apply_to_rows_with_images(seeing: LoadedModel, reference: Any, tmp_path: Path) -> None:
    made = make_adapter(seeing.model, tmp_path)
    assert seeing.card.vision is not None
    with AdapterBench(seeing, {"a@1": made}) as bench:
        bench.provide()
        requests = []
        for at, adapter in enumerate(["a@1", "", "a@1"]):
            spec, sent = image_spec(f"s{at}", seeing.card.vision, WHAT, [picture(at % 2)])
            requests.append(RowRequest(msgspec.structs.replace(spec, adapter=adapter), pictures=sent))
        bench.engine.submit(requests)
        bench.run()
        for at, (model, shown) in enumerate([(made.reference, 0), (seeing.model, 1), (made.reference, 0)]):
            said = bench.tokens(f"s{at}")
            logits_LV = behind(model, reference, requests[at].spec.prompt_ids, [picture(shown)], said)
            assert said == mx.argmax(logits_LV, axis=-1).tolist()
        assert bench.tokens("s0") != bench.tokens("s1")
