"""Learning with images: a policy sees what the worker has sampled with, and chats are read as requests are."""

import base64
from collections.abc import Generator
from contextlib import closing
from typing import Any

import mlx.core as mx
import msgspec
import pytest

pytest.importorskip("mlx_vlm")

from shared.errors import SetupError
from shared.text.codec import TextCodec
from shared.trajectories import Trajectory
from tests.engine.test_vision import WHAT, Gaze
from tests.engine.vision_models import image_spec, picture, png, write_vision_model
from trainer.datasets.lines import exchange
from trainer.learn.batches import Sample, SampleGroup, pad
from trainer.learn.logprobs import row_scores, shared_scores, to_arrays
from trainer.learn.measures import measure_parity
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import Observation
from trainer.vision.pictures import Pictures
from trainer.vision.sight import Sight, sight_of
from worker.engine.messages import EngineConfig
from worker.engine.model.loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def seeing(family: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_vision_model(tmp_path_factory.mktemp("models") / family, family)
    return load_model(EngineConfig(str(folder)))


@pytest.fixture(scope="module", params=["mistral3", "pixtral", "smolvlm"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True, scope="module")
def test_a_tower_whose_vectors_are_not_all_that_a_layer_gets_is_not_learned_with(seeing: LoadedModel) -> None:
    assert seeing.tower is not None and sight_of(seeing.tower) is None


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
