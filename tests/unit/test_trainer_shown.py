import pytest
from msgspec.structs import replace

from shared.text.codec import TextCodec
from shared.training import BoardSample
from shared.trajectories import Reward, Trajectory
from tests.unit.api_texts import bundle
from tests.unit.trainer_samples import group, trajectory
from trainer.rollouts.shown import COMPLETION, PROMPT, shown_samples


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(bundle())


def sample(codec: TextCodec, reward: float | None, reply: str, prompt: str = "a question") -> Trajectory:
    ids = codec.encode(reply)
    return trajectory(reward, ids, prompt=codec.encode(prompt), spans=[("policy@3", 0, len(ids))])


def rewards(shown: tuple[BoardSample, ...]) -> list[float | None]:
    return [each.reward for each in shown]


def test_the_highest_and_the_lowest_rewards_are_shown_and_some_between(codec: TextCodec) -> None:
    groups = [
        group(*(sample(codec, reward, f"reply {reward:g}") for reward in half)) for half in ([3, 0, 5], [1, 4, 2])
    ]
    assert rewards(shown_samples(groups, 4, codec)) == [5, 3, 2, 0]
    assert rewards(shown_samples(groups, 2, codec)) == [5, 0] and rewards(shown_samples(groups, 1, codec)) == [5]
    assert rewards(shown_samples(groups, 9, codec)) == [5, 4, 3, 2, 1, 0] and shown_samples(groups, 0, codec) == ()
    first = shown_samples(groups, 4, codec)[0]
    assert (first.completion, first.prompt, first.version) == ("reply 5", "a question", "policy@3")


def test_a_sample_that_failed_is_shown_with_its_error(codec: TextCodec) -> None:
    broken = replace(sample(codec, None, "what it said"), reward=Reward("mine", None, error="KeyError: 'answer'"))
    *_, last = shown_samples([group(sample(codec, 1, "right"), broken, broken)], 4, codec)
    assert (last.reward, last.completion, last.error) == (None, "what it said", "KeyError: 'answer'")


def test_long_texts_are_shortened(codec: TextCodec) -> None:
    long = sample(codec, 1, "so " * 2000, "x" * 5000 + " the end")
    (shown,) = shown_samples([group(long)], 4, codec)
    assert len(shown.completion) <= COMPLETION + 1 and shown.completion.endswith("…")
    assert len(shown.prompt) <= PROMPT + 1 and shown.prompt.startswith("…") and shown.prompt.endswith("the end")
