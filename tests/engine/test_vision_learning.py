"""Learning with images: a policy sees what the worker has sampled with, and chats are read as requests are."""

import asyncio
import base64
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten
from PIL import Image

pytest.importorskip("mlx_vlm")

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.errors import EngineError, SetupError, UnsupportedModelError
from shared.learners import Datum, LearnerSpec, PassRequest, StepRequest, Values
from shared.text.codec import TextCodec
from shared.trajectories import Trajectory
from tests.engine.test_vision import WHAT, Gaze
from tests.engine.vision_models import CONFIGS, behind, image_spec, picture, png, whole_model, write_vision_model
from trainer.learn.batches import Sample, SampleGroup, pad
from trainer.learn.compute import ThreadHost, at_once, finished
from trainer.learn.logprobs import BatchArrays, can_share_prompts, row_scores, shared_scores, to_arrays
from trainer.learn.measures import measure_parity
from trainer.learn.options import AdapterShape, Schedule
from trainer.learn.policy import Policy
from trainer.learners.data import DataOptions
from trainer.learners.tuning import TuneLearner
from trainer.learners.tuning_examples import Tuning, read_examples
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import Observation
from trainer.rollouts.picture_shelf import PictureShelf
from trainer.rollouts.pictures import ChatPictures
from trainer.rollouts.sight import Sight
from trainer.service.learner import ServiceLearner

SHAPE = AdapterShape(rank=4)


@pytest.fixture(scope="module")
def seeing(family: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_vision_model(tmp_path_factory.mktemp("models") / family, family)
    return load_model(EngineConfig(str(folder)))


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.long
def test_a_policy_learns_from_the_vectors_that_the_worker_has_sampled_with(seeing: LoadedModel) -> None:
    bench, assumed = Gaze(seeing), seeing.tower
    assert assumed is not None
    asked = {"one": (WHAT, [1]), "two": ("<image>\n<image> Compare.", [6, 2]), "text": ("Tell me of the sea.", [])}
    for name, (text, seeds) in asked.items():
        bench.ask(name, text, [drawn(seed) for seed in seeds], temperature=1.0, seed=3, max_tokens=7)
    bench.run()
    assert seeing.card.vision is not None
    sight, groups, trajectories = Sight(assumed, vector_bytes=1), [], []
    for name, (text, seeds) in asked.items():
        spec, sent = image_spec(name, seeing.card.vision, text, [drawn(seed) for seed in seeds])
        for each in sent:
            sight.show(each)
        ids, said = tuple(bench.tokens(name)), tuple(bench.logprobs(name))
        of_images = {"images": spec.images, "image_token": spec.image_token}
        trajectories.append(Trajectory(0, 0, spec.prompt_ids, ids, "", said, "stop", **of_images))
        sample = Sample(ids, said, (True,) * 7, (0,) * 7, 1.0)
        groups.append(SampleGroup(name, spec.prompt_ids, (sample, sample), **of_images))
    policy = Policy(seeing.model, SHAPE, sight=sight)
    for trajectory in trajectories:
        assert finished(measure_parity(policy, [trajectory])) < 2e-3
    x = to_arrays(pad(groups), sight)
    ways: list[Any] = [shared_scores, row_scores] if can_share_prompts(policy.base) else [row_scores]
    for scores in ways:
        differences = mx.abs(scores(policy.model, x, chunk=64).logp_BT - x.sampler_BT)
        assert float(mx.where(x.mask_BT, differences, 0.0).max()) < 1e-2, scores
    careful = Policy(seeing.model, SHAPE, sight=sight, checkpoint_layers=True)
    gradients = [gradient(policy.model, scores, x) for scores in ways] + [gradient(careful.model, row_scores, x)]
    for other in gradients[1:]:
        assert all(np.allclose(other[name], wanted, atol=2e-3, rtol=1e-2) for name, wanted in gradients[0].items())
    assert max(np.abs(array).max() for array in gradients[0].values()) > 0.1
    blind = msgspec.structs.replace(trajectories[0], images=trajectories[1].images[:1])
    assert finished(measure_parity(policy, [blind])) > 0.05, "of another image they are others"


@pytest.mark.long
def test_a_learner_of_the_service_sees_what_the_worker_has_sampled_with(seeing: LoadedModel) -> None:
    bench, vision = Gaze(seeing), seeing.card.vision
    assert vision is not None and seeing.tower is not None
    asked = {"one": (WHAT, [1]), "two": ("<image>\n<image> Compare.", [6, 2]), "text": ("Tell me of the sea.", [])}
    data, shown = [], {}
    for name, (text, seeds) in asked.items():
        bench.ask(name, text, [drawn(seed) for seed in seeds], temperature=1.0, seed=3, max_tokens=7)
    bench.run()
    for name, (text, seeds) in asked.items():
        spec, sent = image_spec(name, vision, text, [drawn(seed) for seed in seeds])
        shown |= {each.key: each for each in sent}
        whole = [*spec.prompt_ids, *bench.tokens(name)]
        weights = np.array([0.0] * (len(spec.prompt_ids) - 1) + [1.0] * 7, np.float32)
        inputs = {"target_tokens": Values.of(np.array(whole[1:])), "weights": Values.of(weights)}
        data.append(Datum(np.array(whole[:-1], "<i4").tobytes(), inputs, spec.images))
    learner_spec = LearnerSpec(id="l", model="m", rank=4, scale=2.0)
    learner = ServiceLearner(seeing.model, learner_spec, sight=Sight(seeing.tower, tile_bytes=0))
    first = finished(learner.run(PassRequest(tuple(data), "cross_entropy"), shown))
    for name, output in zip(asked, first.outputs, strict=True):
        assert np.allclose(output["logprobs"].array()[-7:], bench.logprobs(name), atol=1e-2), name
    learner.step(StepRequest(learning_rate=1e-3))
    again = finished(learner.run(PassRequest(tuple(data), "cross_entropy", backward=False), shown))
    assert again.metrics["loss:sum"] < first.metrics["loss:sum"]
    blind = Datum(data[0].tokens, data[0].inputs, data[1].images[:1])
    (other,) = finished(learner.run(PassRequest((blind,), "cross_entropy", backward=False), shown)).outputs
    gaps = other["logprobs"].array()[-7:] - again.outputs[0]["logprobs"].array()[-7:]
    assert np.abs(gaps).max() > 0.05, "of another image they are others"
    with pytest.raises(UnsupportedModelError, match="learn from images"):
        finished(ServiceLearner(seeing.model, learner_spec).run(PassRequest((data[0],), "cross_entropy"), shown))
    short = Datum(data[0].tokens, data[0].inputs, (msgspec.structs.replace(data[0].images[0], tokens=1),))
    with pytest.raises(EngineError, match="vectors"):
        finished(learner.run(PassRequest((short,), "cross_entropy"), shown))


@pytest.mark.parametrize("family", ["smolvlm"], indirect=True, scope="module")
async def test_a_chats_images_are_named_as_a_request_names_them(seeing: LoadedModel) -> None:
    assert seeing.tower is not None and seeing.card.vision is not None
    sight = Sight(seeing.tower)
    url = "data:image/png;base64," + base64.b64encode(png(picture(1))).decode()
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    with closing(ChatPictures(sight)) as pictures:
        encoder = ChatEncoder(TextCodec(seeing.tokenizer), pictures=pictures)
        prompt = Observation(({"role": "user", "content": [part, {"type": "text", "text": "What?"}]},))
        opening = await encoder.opening(prompt)
        spec, sent = image_spec("s", seeing.card.vision, "user:<image>What?", [picture(1)])
        assert opening.images == spec.images and opening.image_token == spec.image_token
        assert opening.ids[: len(spec.prompt_ids)] == spec.prompt_ids
        assert opening.files == {spec.images[0].sha256: png(picture(1))}
        assert len(sight.seen([sent[0].key])[0].vectors_TH) == spec.images[0].tokens
        assert encoder.following(prompt, [5], [{"role": "user", "content": "And?"}])
        for wrong in ("data:image/png;base64,AAAA", "data:image/png;base64,@", "a.png"):
            bad = {"role": "user", "content": [{**part, "image_url": {"url": wrong}}]}
            with pytest.raises(SetupError, match="an image of a prompt"):
                await encoder.opening(Observation((bad,)))
        with pytest.raises(SetupError, match="not later"):
            encoder.following(prompt, [5], prompt.prompt)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="sees none"):
        await ChatEncoder(TextCodec(seeing.tokenizer)).opening(prompt)


def asking(text: str, *images: Image.Image) -> dict[str, Any]:
    """A user's message, with an image for each mark in its text."""
    parts: list[dict[str, Any]] = []
    for at, piece in enumerate(text.split("<image>")):
        if at:
            url = "data:image/png;base64," + base64.b64encode(png(images[at - 1])).decode()
            parts.append({"type": "image_url", "image_url": {"url": url}})
        parts += [{"type": "text", "text": piece}] if piece else []
    return {"role": "user", "content": parts}


def answer(text: str, **more: int) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.long
@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_vl"], indirect=True, scope="module")
async def test_examples_with_images_are_tuned_on_as_mlx_vlm_sees_them(
    seeing: LoadedModel, family: str, tmp_path: Path
) -> None:
    assert seeing.tower is not None and seeing.card.vision is not None
    reference, vision, codec = whole_model(family), seeing.card.vision, TextCodec(seeing.tokenizer)
    one, two = drawn(1), drawn(2)
    talk = [asking("<image>What?", one), answer("A sea."), asking("And <image>?", two), answer("Two ships.")]
    lines = [
        {"messages": talk},
        {"messages": [asking("<image><image>Which?", one, two), answer("no", weight=0), asking("Why?"), answer("It.")]},
        {"prompt": [asking("<image>What?", two)], "completion": "Ships."},
        {"messages": [asking("Hello"), answer("Hi.")]},
    ]
    with closing(PictureShelf(Sight(seeing.tower, tile_bytes=1, vector_bytes=1))) as shelf:
        path = written(tmp_path, *lines)
        items = (await asyncio.to_thread(read_examples, path, "sft", codec, 500, None, shelf)).items
        assert [len(item.images) for item in items] == [1, 2, 2, 1, 0], "later images begin a row of their own"
        spec, _ = image_spec("s", vision, "user:<image>What?", [one])
        assert items[0].images == spec.images
        assert items[0].prompt_ids[: len(spec.prompt_ids)] == spec.prompt_ids
        assert items[1].prompt_ids[: len(items[0].prompt_ids)] == items[0].prompt_ids
        said = [list(item.samples[0].completion_ids) for item in items]
        shown = [[one], [one, two], [one, two], [two]]
        logits = [
            behind(seeing.model, reference, item.prompt_ids, pictures, ids)
            for item, pictures, ids in zip(items, shown, said, strict=False)
        ]
        logits.append(seeing.model(mx.array([[*items[4].prompt_ids, *said[4][:-1]]]))[0, -len(said[4]) :])
        nll = [
            -float(mx.take_along_axis(each - mx.logsumexp(each, -1, keepdims=True), mx.array(ids)[:, None], -1).sum())
            for each, ids in zip(logits, said, strict=True)
        ]
        wanted = sum(nll) / sum(map(len, said))
        async with ThreadHost() as host:
            options = DataOptions(Schedule(peak=3e-3), SHAPE, 256, 1.0, 0.0, (0.9, 0.99), 0)
            learner = await host.run(
                at_once(lambda: TuneLearner(seeing.model, "sft", SHAPE, 0.1, options, shelf.sight))
            )
            before = await host.run(lambda: learner.measure(items))
            assert before.loss == pytest.approx(wanted, abs=2e-3)
            for step in range(6):
                report = await host.run(lambda step=step: learner.train(items, step))  # type: ignore[misc]
                assert step or report.loss == pytest.approx(wanted, abs=2e-3)
            assert (await host.run(lambda: learner.measure(items))).loss < wanted - 0.3


@pytest.mark.parametrize("family", ["smolvlm"], indirect=True, scope="module")
async def test_pairs_answer_one_image_and_what_cannot_be_learned_from_is_refused(
    seeing: LoadedModel, tmp_path: Path
) -> None:
    assert seeing.tower is not None
    codec, what = TextCodec(seeing.tokenizer), asking("<image>What?", drawn(1))

    async def read(
        line: dict[str, Any], tuning: Tuning = "sft", shelf: PictureShelf | None = None
    ) -> tuple[SampleGroup, ...]:
        path = written(tmp_path, line)
        return (await asyncio.to_thread(read_examples, path, tuning, codec, 500, None, shelf)).items

    with closing(PictureShelf(Sight(seeing.tower, tile_bytes=1, vector_bytes=1))) as shelf:
        lines = [{"prompt": [what], "chosen": "A sea.", "rejected": "No."}]
        lines.append({**lines[0], "prompt": [asking("<image>What?", drawn(3))]})
        items = [item for line in lines for item in await read(line, "dpo", shelf)]
        assert items[0].prompt_ids == items[1].prompt_ids and items[0].images != items[1].images
        async with ThreadHost() as host:
            options = DataOptions(Schedule(peak=3e-2), SHAPE, 256, 1.0, 0.0, (0.9, 0.99), 0)
            learner = await host.run(
                at_once(lambda: TuneLearner(seeing.model, "dpo", SHAPE, 0.1, options, shelf.sight))
            )
            assert (await host.run(lambda: learner.measure(items))).margin == 0, "each is held against its own image"
            await host.run(lambda: learner.train(items, 0))
            assert ((await host.run(lambda: learner.measure(items))).margin or 0) > 0
        reply, broken = answer("A sea."), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        for messages, words in (
            ([{**what, "role": "assistant"}, reply], "images are the user's"),
            ([{"role": "user", "content": [broken]}, reply], "line 1: an image of a prompt"),
            ([{"role": "user", "content": [{"type": "video_url"}]}, reply], "neither a text nor an image"),
            ([asking("<image>What?", drawn(1)), answer("<image>")], "own mark"),
        ):
            with pytest.raises(SetupError, match=words):
                await read({"messages": messages}, "sft", shelf)
    with pytest.raises(SetupError, match="a model that sees"):
        await read({"messages": [what, reply]})


def gradient(model: Any, scores: Any, x: BatchArrays) -> dict[str, Any]:
    def loss(model: Any) -> mx.array:
        return mx.where(x.mask_BT, scores(model, x, chunk=64).logp_BT, 0.0).sum()

    _, found = nn.value_and_grad(model, loss)(model)
    return {name: np.array(array) for name, array in tree_flatten(found)}


def drawn(seed: int) -> Image.Image:
    """Of two sizes; LFM2-VL cuts the second one into tiles, and the whole picture behind them has no tile's size."""
    return picture(seed) if seed != 2 else picture(seed, 128, 100)
