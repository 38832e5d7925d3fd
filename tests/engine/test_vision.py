"""Rows with images in the batch: the tokens of mlx-vlm alone, and never another image's KV."""

import base64
import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

pytest.importorskip("mlx_vlm")

from shared.errors import SetupError
from shared.text.codec import TextCodec
from shared.trajectories import Trajectory
from tests.engine.adapter_bench import AdapterBench
from tests.engine.adapter_models import make_adapter
from tests.engine.conftest import Bench
from tests.engine.vision_models import CONFIGS, alone, image_spec, picture, pixels, png, whole_model, write_vision_model
from trainer.datasets.lines import exchange
from trainer.learn.batches import Sample, SampleGroup, pad
from trainer.learn.logprobs import row_scores, shared_scores, to_arrays
from trainer.learn.measures import measure_parity
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import Observation
from trainer.vision.pictures import Pictures
from trainer.vision.sight import Sight
from worker.engine.messages import EngineConfig, Picture, RowRequest, SpeculationConfig
from worker.engine.model.loader import LoadedModel, load_model
from worker.engine.vision.families import check_known, is_vision
from worker.engine.vision.gallery import TRIED_AGAIN, TileTimes

WHAT = "What is this? <image> Say it."


@pytest.fixture(scope="module")
def seeing(family: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_vision_model(tmp_path_factory.mktemp("models") / family, family)
    return load_model(EngineConfig(str(folder)))


@pytest.fixture(scope="module")
def reference(family: str) -> Any:
    model = whole_model(family)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Gaze(Bench):
    """A bench whose sequences bring images."""

    def __init__(self, loaded: LoadedModel, **config: object) -> None:
        super().__init__(loaded, **({"block_size": 16} | config))
        self.shown: dict[str, tuple[Any, list[Any]]] = {}

    def ask(self, seq: str, text: str, pictures: list[Any] = (), *, group: str = "", **sampling: Any) -> None:  # type: ignore[assignment]
        assert self.loaded.card.vision is not None
        detail = sampling.pop("detail", "high")
        spec, sent = image_spec(seq, self.loaded.card.vision, text, list(pictures), detail, **sampling)
        spec = msgspec.structs.replace(spec, group=group)
        self.shown[seq] = spec, list(pictures)
        self.send(spec, sent)

    def send(self, spec: Any, sent: tuple[Picture, ...]) -> None:
        self.engine.submit([RowRequest(spec, pictures=sent)])

    def check(self, reference: Any, *names: str) -> None:
        for seq in names or self.shown:
            spec, pictures = self.shown[seq]
            assert self.tokens(seq) == alone(reference, spec.prompt_ids, pictures, spec.sampling.max_tokens), seq


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


def test_what_it_says_depends_on_the_image(seeing: LoadedModel, reference: Any) -> None:
    bench = Gaze(seeing)
    for seed in range(6):
        bench.ask(f"s{seed}", WHAT, [picture(seed)])
    bench.run()
    bench.check(reference)
    assert len({tuple(bench.tokens(f"s{seed}")) for seed in range(6)}) > 3


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
    assert bench.finish("other").cached_tokens == bench.finish("low").cached_tokens == before
    bench.check(reference, "first", "same", "other")
    assert bench.engine.stats().vision.encoded == 3


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


def test_few_kept_images_are_encoded_again(seeing: LoadedModel, reference: Any) -> None:
    bench = Gaze(seeing, image_cache_bytes=1, prefix_cache_bytes=0)
    for turn in range(2):
        for seed in range(3):
            bench.ask(f"{turn} {seed}", "<image> or <image>?", [picture(seed), picture(seed + 1)])
        bench.run()
    bench.check(reference)
    assert bench.engine.stats().vision.bytes == 0


def test_rows_that_cannot_see_are_refused_and_the_others_go_on(seeing: LoadedModel, reference: Any) -> None:
    bench, vision = Gaze(seeing), seeing.card.vision
    assert vision is not None
    good, sent = image_spec("good", vision, WHAT, [picture(1)])
    bench.shown["good"] = good, [picture(1)]
    replace = msgspec.structs.replace
    (ref,) = good.images
    bad = {
        "missing": (good, ()),
        "count": (replace(good, prompt_ids=(*good.prompt_ids, good.image_token, 5)), sent),
        "foreign": (replace(good, images=(replace(ref, key=b"other"),)), sent),
        "end": (replace(good, prompt_ids=good.prompt_ids[: -len(" Say it.") - 1]), sent),
        "tokens": (replace(good, images=(replace(ref, tokens=ref.tokens + 1),)), sent),
        "broken": (replace(good, images=()), ()),
    }
    for name, (spec, pictures) in bad.items():
        bench.send(replace(spec, id=name), pictures)
    short = [replaced(sent[0], tiles=[tile[:-7] for tile in sent[0].tiles])]
    bench.send(replace(good, id="short"), tuple(short))
    bench.send(good, sent)
    bench.run()
    errors = {name: bench.finish(name).reason for name in (*bad, "short")}
    assert errors == dict.fromkeys(errors, "error") | {"broken": "length"}, "without images it is text"
    bench.ask("later", WHAT, [picture(1)])
    bench.run()
    bench.check(reference, "later")
    assert not bench.engine._gallery._wanted and not bench.engine._gallery._failed


def test_drafts_are_checked_for_rows_with_images_as_for_others(seeing: LoadedModel, reference: Any) -> None:
    bench = Gaze(seeing, speculation=SpeculationConfig(adapts_to_time=False, memory_bytes=1 << 20))
    for turn in range(2):
        for seed in range(3):
            bench.ask(f"{turn} {seed}", WHAT, [picture(seed)], max_tokens=40)
        bench.ask(f"{turn} text", "abcabcabcabcabc", max_tokens=40)
        bench.run()
    bench.check(reference)
    assert bench.engine.stats().speculation.accepted > 0


def test_a_quantised_checkpoint_is_seen_with(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "small", bits=8)
    loaded = load_model(EngineConfig(str(folder)))
    assert loaded.card.quantization == "8 bits, groups of 32"
    from mlx_vlm.utils import load_model as load_whole

    bench = Gaze(loaded)
    bench.ask("one", WHAT, [picture(1)])
    bench.run()
    bench.check(load_whole(folder))


def test_a_folder_that_is_not_as_it_should_be_is_refused_in_words(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "molmo"}))
    with pytest.raises(
        SetupError, match="family 'molmo' are not supported; these are: idefics3, smolvlm, pixtral, mistral3"
    ):
        load_model(EngineConfig(str(folder)))
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": settings.pop("chat_template")}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "<image>" in load_model(EngineConfig(str(folder))).tokenizer.chat_template
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 64}))
    with pytest.raises(SetupError, match="64 tokens a tile"):
        load_model(EngineConfig(str(folder)))


def test_of_mistral_3_only_what_runs_in_the_batch_is_seen_with(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "small", "mistral3")
    file, config = folder / "config.json", json.loads((folder / "config.json").read_text())
    for text in ("ministral3", "mistral4"):
        assert not is_vision({**config, "text_config": {**config["text_config"], "model_type": text}})
    tied = {**config, "text_config": {**config["text_config"], "tie_word_embeddings": True}}
    file.write_text(json.dumps(tied))
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["language_model.lm_head.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    from mlx_vlm.utils import load_model as load_whole

    bench = Gaze(load_model(EngineConfig(str(folder))))
    bench.ask("one", WHAT, [picture(1)])
    bench.run()
    bench.check(load_whole(folder))
    file.write_text(json.dumps({**tied, "vision_config": {**config["vision_config"], "image_size": 56}}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 50}}))
    with pytest.raises(SetupError, match="50 pixels in squares of 16 do not fit a tower of 56"):
        load_model(EngineConfig(str(folder)))
    del tied["text_config"]["rope_theta"]
    file.write_text(json.dumps(tied))
    with pytest.raises(SetupError, match="no rope_theta"):
        load_model(EngineConfig(str(folder)))


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "qwen3_vl", "lfm2-vl"])
def test_a_model_whose_tower_we_do_not_run_says_at_start_that_it_refuses_images(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model_type": kind, "text_config": {}, "vision_config": {"hidden_size": 8}}
    assert not is_vision(config)
    try:
        check_known(config)
    except SetupError as refusal:
        assert f"family {kind!r} are not supported" in str(refusal)
    else:
        assert f"engine.images_refused family={kind}" in caplog.text
    caplog.clear()
    check_known({"model_type": "llama"})
    assert not caplog.text


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
            said, ids = bench.tokens(f"s{at}"), mx.array([requests[at].spec.prompt_ids])
            seen_1LH = reference.get_input_embeddings(ids, **pixels(reference, [picture(shown)])).inputs_embeds
            told_1LH = model.model.embed_tokens(mx.array([said[:-1]]))
            logits_LV = model(None, input_embeddings=mx.concatenate([seen_1LH, told_1LH], axis=1))[0, -len(said) :]
            assert said == mx.argmax(logits_LV, axis=-1).tolist()
        assert bench.tokens("s0") != bench.tokens("s1")


def test_a_policy_learns_from_the_vectors_that_the_worker_has_sampled_with(seeing: LoadedModel) -> None:
    bench, assumed = Gaze(seeing), seeing.tower
    assert assumed is not None
    asked = {"one": (WHAT, [1]), "two": ("<image>\n<image> Compare.", [6, 2]), "text": ("Tell me of the sea.", [])}
    for name, (text, seeds) in asked.items():
        bench.ask(name, text, [picture(seed) for seed in seeds], temperature=1.0, seed=3, max_tokens=7)
    bench.run()
    assert seeing.card.vision is not None
    sight, groups, trajectories = Sight(assumed, vector_bytes=1), [], []
    for name, (text, seeds) in asked.items():
        spec, sent = image_spec(name, seeing.card.vision, text, [picture(seed) for seed in seeds])
        for each in sent:
            sight.show(each)
        ids, said = tuple(bench.tokens(name)), tuple(bench.logprobs(name))
        of_images = {"images": spec.images, "image_token": spec.image_token}
        trajectories.append(Trajectory(0, 0, spec.prompt_ids, ids, "", said, "stop", **of_images))
        sample = Sample(ids, said, (True,) * 7, (0,) * 7, 1.0)
        groups.append(SampleGroup(name, spec.prompt_ids, (sample, sample), **of_images))
    policy = Policy(seeing.model, AdapterShape(rank=4), sight=sight)
    for trajectory in trajectories:
        assert at_once(measure_parity(policy, [trajectory])) < 2e-3
    x = to_arrays(pad(groups), sight)
    for scores in (shared_scores, row_scores):
        differences = mx.abs(scores(policy.model, x, chunk=64).logp_BT - x.sampler_BT)
        assert float(mx.where(x.mask_BT, differences, 0.0).max()) < 1e-2, scores
    blind = msgspec.structs.replace(trajectories[0], images=trajectories[1].images[:1])
    assert at_once(measure_parity(policy, [blind])) > 0.05, "of another image they are others"


@pytest.mark.parametrize("family", ["smolvlm"], indirect=True, scope="module")
async def test_a_chats_images_are_named_as_a_request_names_them(seeing: LoadedModel) -> None:
    assert seeing.tower is not None and seeing.card.vision is not None
    sight = Sight(seeing.tower)
    url = "data:image/png;base64," + base64.b64encode(png(picture(1))).decode()
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    with closing(Pictures(sight)) as pictures:
        encoder = ChatEncoder(TextCodec(seeing.tokenizer), pictures=pictures)
        prompt = Observation(({"role": "user", "content": [part, {"type": "text", "text": "What?"}]},))
        opening = await encoder.opening(prompt)
        spec, sent = image_spec("s", seeing.card.vision, "user:<image>What?", [picture(1)])
        assert opening.images == spec.images and opening.image_token == spec.image_token
        assert opening.ids[: len(spec.prompt_ids)] == spec.prompt_ids
        assert opening.files == {spec.images[0].sha256: png(picture(1))}
        assert len(sight.vectors([sent[0].key])) == spec.images[0].tokens
        assert encoder.following(prompt, [5], [{"role": "user", "content": "And?"}])
        for wrong in ("data:image/png;base64,AAAA", "data:image/png;base64,@", "a.png"):
            bad = {"role": "user", "content": [{**part, "image_url": {"url": wrong}}]}
            with pytest.raises(SetupError, match="an image of a prompt"):
                await encoder.opening(Observation((bad,)))
        with pytest.raises(SetupError, match="not later"):
            encoder.following(prompt, [5], prompt.prompt)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="sees none"):
        await ChatEncoder(TextCodec(seeing.tokenizer)).opening(prompt)
    with pytest.raises(ValueError, match="not learned from yet"):
        exchange(list(prompt.prompt), "an answer")  # type: ignore[arg-type]


def at_once(work: Generator[None, None, float]) -> float:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return float(done.value)
