import re
from dataclasses import replace as replaced
from pathlib import Path

import pytest
from msgspec.structs import replace

from shared.errors import ServiceUnavailableError, SetupError
from shared.frames import VersionSpan
from shared.jobs import SamplingOverrides
from shared.text.codec import TextCodec, TokenizerBundle
from shared.trajectories import Trajectory
from trainer.learn.batches import sample_groups
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import (
    ArithmeticEnvironment,
    DatasetEnvironment,
    Environment,
    Observation,
    Outcome,
    Question,
    Task,
    load_class,
    read_jsonl,
)
from trainer.rollouts.episodes import EpisodeOptions, Episodes
from trainer.rollouts.groups import RolloutRequest, problem
from trainer.tiny.data import split_of
from trainer.tiny.tokenizer import CHAT_TEMPLATE, build_tokenizer


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    tokenizer = build_tokenizer(0)
    end = tokenizer.token_to_id("<|im_end|>")
    return TextCodec(TokenizerBundle(tokenizer.to_str(), CHAT_TEMPLATE, (end,), {"eos_token": "<|im_end|>"}))


class ScriptedSource:
    """Answers from a list, one reply a call and sample; keeps the requests."""

    def __init__(self, codec: TextCodec, *replies: str) -> None:
        self.codec, self.replies = codec, list(replies)
        self.requests: list[RolloutRequest] = []

    async def generate(self, request: RolloutRequest) -> list[Trajectory]:
        self.requests.append(request)
        return [self._answer(request, sample, self.replies.pop(0)) for sample in range(request.n)]

    def _answer(self, request: RolloutRequest, sample: int, reply: str) -> Trajectory:
        ids = tuple(self.codec.encode(reply, add_special_tokens=False))
        version = f"policy@{len(self.requests)}"
        return Trajectory(
            prompt_index=0,
            sample_index=sample,
            prompt_ids=request.prompt_ids,
            completion_ids=ids,
            text=reply,
            logprobs=tuple(-1.0 - i for i in range(len(ids))),
            finish_reason="stop",
            spans=(VersionSpan(version, 0, len(ids)),),
        )


class Calculator:
    """Answers `add a b` with a tool's result, and rewards the final reply."""

    name = "calculator"

    async def reset(self, index: int) -> Observation:
        return Observation(({"role": "user", "content": f"What is {index} + 2?"},), info=index + 2)

    async def step(self, observation: Observation, action: str) -> Outcome:
        if action.startswith("add"):
            total = sum(map(int, action.split()[1:]))
            return Outcome(0.1, done=False, messages=({"role": "tool", "content": str(total)},))
        return Outcome(float(action == str(observation.info)), components={"final": 1.0})


async def test_a_tools_result_stands_between_two_turns_and_is_masked(codec: TextCodec) -> None:
    source = ScriptedSource(codec, "add 3 2<|im_end|>", "7<|im_end|>", "5<|im_end|>")
    options = EpisodeOptions("run", group_size=2, sampling=SamplingOverrides(max_tokens=8), max_turns=3, seed=4)
    played = await Episodes(source, Calculator(), ChatEncoder(codec), options).play(3, "policy")
    two_turns, one_turn = played.trajectories
    reward = two_turns.reward
    assert reward is not None and reward.value == pytest.approx(1.1)
    assert reward.components == {"final": 1.0}
    text = codec.decode([*two_turns.prompt_ids, *two_turns.completion_ids], skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nWhat is 3 + 2?<|im_end|>\n<|im_start|>assistant\nadd 3 2<|im_end|>\n"
        "<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    own = [token for token, mine in zip(two_turns.completion_ids, two_turns.loss_mask, strict=True) if mine]
    assert codec.decode(own, skip_special_tokens=False) == "add 3 2<|im_end|>5<|im_end|>"
    assert len(two_turns.logprobs) == len(two_turns.completion_ids)
    covered = [p for span in two_turns.spans for p in range(span.start, span.end)]
    assert covered == list(range(len(two_turns.completion_ids)))
    assert one_turn.reward is not None and one_turn.reward.value == 0.0
    assert one_turn.loss_mask == ()
    groups, _ = sample_groups([played], {"policy@1": 4, "policy@2": 5})
    assert set(groups[0].samples[0].policy_steps) == {4, 5}


class Duel:
    """Asks another policy the same, as often as it is told, and rewards what is said twice."""

    name = "duel"

    def __init__(self, question: Question, times: int = 1) -> None:
        self._question, self._times = question, times

    async def reset(self, index: int) -> Observation:
        return Observation(({"role": "user", "content": "1+1="},), info=[])

    async def step(self, observation: Observation, action: str) -> Outcome:
        said = [*observation.info, action]
        if len(said) <= self._times:
            return Outcome(0.25, info=said, components={f"asked {len(said)}": 1.0}, question=self._question)
        return Outcome(float(len(set(said)) == 1), components={"same": 1.0})


ASKED = Question("other@3", ({"role": "user", "content": "2-0="},), max_tokens=3, temperature=0.5)


async def test_another_policy_is_asked_and_stays_out_of_the_sample(codec: TextCodec) -> None:
    source = ScriptedSource(codec, "2<|im_end|>", "2<|im_end|>", "3<|im_end|>")
    options = EpisodeOptions("run", group_size=1, seed=4)
    played = await Episodes(source, Duel(ASKED, times=2), ChatEncoder(codec), options).play(0, "policy@1")
    (sample,) = played.trajectories
    assert sample.reward is not None and sample.reward.value == 0.5
    assert sample.reward.components == {"asked 1": 1.0, "asked 2": 1.0, "same": 1.0}
    assert codec.decode(sample.completion_ids) == "2" and sample.loss_mask == ()
    mine, first, second = source.requests
    assert (mine.adapter, first.adapter, second.adapter) == ("policy@1", "other@3", "other@3")
    assert "2-0=" in codec.decode(first.prompt_ids) and first.prompt_ids == second.prompt_ids
    assert (first.sampling.max_tokens, first.sampling.temperature) == (3, 0.5)
    assert (
        len({mine.id, first.id, second.id}) == len({mine.sampling.seed, first.sampling.seed, second.sampling.seed}) == 3
    )


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (replaced(ASKED, policy="no/name"), "name"),
        (replaced(ASKED, policy="other@x"), "NAME@VERSION"),
        (replaced(ASKED, policy="@3"), "NAME@VERSION"),
        (replaced(ASKED, messages=()), "no messages"),
        (replaced(ASKED, max_tokens=0), "max_tokens"),
        (replaced(ASKED, temperature=float("nan")), "temperature"),
        (ASKED, "16 questions"),
    ],
)
async def test_a_question_that_must_not_be_asked_costs_its_sample(
    codec: TextCodec, question: Question, why: str
) -> None:
    source = ScriptedSource(codec, *["2<|im_end|>"] * 20)
    episodes = Episodes(source, Duel(question, times=99), ChatEncoder(codec), EpisodeOptions("run", group_size=1))
    (sample,) = (await episodes.play(0, "policy@1")).trajectories
    assert sample.reward is not None and sample.reward.value is None and why in sample.reward.error


async def test_a_ring_that_cannot_generate_the_answer_ends_the_group(codec: TextCodec) -> None:
    class Gone(ScriptedSource):
        async def generate(self, request: RolloutRequest) -> list[Trajectory]:
            if self.requests:
                raise ServiceUnavailableError("no worker")
            return await super().generate(request)

    episodes = Episodes(
        Gone(codec, "2<|im_end|>"), Duel(ASKED), ChatEncoder(codec), EpisodeOptions("run", group_size=1)
    )
    with pytest.raises(ServiceUnavailableError):
        await episodes.play(0, "policy@1")


async def test_the_next_turn_continues_the_sampled_ids_themselves(codec: TextCodec) -> None:
    source = ScriptedSource(codec, "add 1 1<|im_end|>", "0<|im_end|>", "2<|im_end|>")
    options = EpisodeOptions("run", group_size=2, max_turns=2)
    await Episodes(source, Calculator(), ChatEncoder(codec), options).play(0, "policy@3")
    first, second = source.requests
    sampled = codec.encode("add 1 1<|im_end|>", add_special_tokens=False)
    assert second.prompt_ids[: len(first.prompt_ids) + len(sampled)] == (*first.prompt_ids, *sampled)
    assert (first.id, second.id) == ("run-0", "run-0-0-1")
    assert (first.n, second.n, second.adapter) == (2, 1, "policy@3")


async def test_ids_and_seeds_follow_from_run_seed_and_index_alone(codec: TextCodec) -> None:
    requests = []
    for _ in range(2):
        source = ScriptedSource(codec, "1", "2")
        options = EpisodeOptions("run", group_size=2, seed=9)
        await Episodes(source, ArithmeticEnvironment(seed=9), ChatEncoder(codec), options).play(5, "policy")
        requests += source.requests
    assert requests[0] == requests[1]
    assert requests[0].sampling.seed is not None


async def test_a_reward_that_raises_marks_the_sample_not_the_group(codec: TextCodec) -> None:
    class Picky(Calculator):
        async def step(self, observation: Observation, action: str) -> Outcome:
            return Outcome(float(int(action)))

    source = ScriptedSource(codec, "4<|im_end|>", "four<|im_end|>")
    played = await Episodes(source, Picky(), ChatEncoder(codec), EpisodeOptions("run", 2)).play(0, "policy")
    first, second = (t.reward for t in played.trajectories)
    assert first is not None and first.value == 4.0
    assert second is not None and second.value is None and "ValueError" in second.error


async def test_arithmetic_tasks_are_fixed_by_index_and_keep_to_their_split() -> None:
    tasks = ArithmeticEnvironment(seed=1, split="held_out")
    for index in range(20):
        first, again = await tasks.reset(index), await tasks.reset(index)
        assert first == again
        (message,) = first.prompt
        digits = "".join(c if str(c).isdigit() else " " for c in message["content"]).split()  # type: ignore[index]
        assert split_of(int(digits[0]), int(digits[1])) == "held_out"
        assert (await tasks.step(first, first.info)).reward == 1.0
        assert (await tasks.step(first, first.info + "0")).reward == 0.0
    fixed = ArithmeticEnvironment(seed=1, count=3)
    assert await fixed.reset(1) == await fixed.reset(4)


async def test_a_data_set_is_gone_through_once_an_epoch_in_another_order() -> None:
    async def scorer(completion: str, reference: object, prompt: object) -> tuple[float, dict[str, float]]:
        return float(completion == reference), {"length": float(len(completion))}

    tasks = [Task(f"p{i}", str(i)) for i in range(7)]
    environment: Environment = DatasetEnvironment("set", tasks, scorer, seed=3)
    epochs = [[(await environment.reset(epoch * 7 + i)).prompt for i in range(7)] for epoch in range(2)]
    assert sorted(map(str, epochs[0])) == sorted(map(str, epochs[1])) == [f"p{i}" for i in range(7)]
    assert epochs[0] != epochs[1]
    outcome = await environment.step(await environment.reset(0), "x")
    assert (outcome.reward, outcome.components) == (0.0, {"length": 1.0})


def test_json_lines_take_prompts_messages_and_gsm8k(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"prompt": "a", "reference": 1}\n\n{"messages": [{"role": "user", "content": "b"}], "answer": "2"}\n'
        '{"question": "c", "answer": "#### 3"}\n'
    )
    tasks = read_jsonl(path)
    assert [task.reference for task in tasks] == [1, "2", "#### 3"]
    assert tasks[2].prompt == ({"role": "user", "content": "c"},)
    assert len(read_jsonl(Path("data/gsm8k/test-64.jsonl"), limit=5)) == 5
    path.write_text('{"prompt": "a"}\n{"no": 1}\n')
    with pytest.raises(SetupError, match="line 2"):
        read_jsonl(path)


def test_an_environment_of_ones_own_is_named_by_module_and_class() -> None:
    loaded = load_class("trainer.rollouts.environments:ArithmeticEnvironment", {"seed": 2})
    assert loaded.name == "arithmetic"
    with pytest.raises(SetupError, match="write it as package"):
        load_class("trainer.rollouts.environments:Nothing", {})


async def played(codec: TextCodec, environment: Environment, **options: int) -> list[Trajectory]:
    source = ScriptedSource(codec, "5<|im_end|>", "6<|im_end|>")
    episodes = Episodes(source, environment, ChatEncoder(codec), EpisodeOptions("run", 2, **options))  # type: ignore[arg-type]
    return list((await episodes.play(3, "policy")).trajectories)


async def test_any_error_of_an_environments_step_costs_its_sample_alone(codec: TextCodec) -> None:
    class Careless(Calculator):
        async def step(self, observation: Observation, action: str) -> Outcome:
            found = re.match("5", action)
            return Outcome(float(found.group()))  # type: ignore[union-attr]

    fine, failed = await played(codec, Careless())
    assert fine.reward is not None and fine.reward.value == 5.0
    why = r"AttributeError: 'NoneType' object has no attribute 'group' \(test_trainer_episodes\.py:\d+\)"
    assert re.fullmatch(why, problem(failed))


async def test_an_environment_that_answers_with_something_else_is_told_what_it_should_give(codec: TextCodec) -> None:
    class Bare(Calculator):
        async def step(self, observation: Observation, action: str) -> Outcome:
            return 1.0  # type: ignore[return-value]

    class Words(Calculator):
        async def reset(self, index: int) -> Observation:
            return "What is 1 + 1?"  # type: ignore[return-value]

    class Text(Calculator):
        async def reset(self, index: int) -> Observation:
            return Observation("1 + 1 =")

        async def step(self, observation: Observation, action: str) -> Outcome:
            return Outcome(0.0, done=False)

    for environment, message in (
        (Bare(), "'calculator': `step` gave 1.0, not a trainer.rollouts.environments.Outcome"),
        (Words(), "`reset` gave 'What is 1"),
        (Text(), "text prompts has one turn"),
    ):
        with pytest.raises(SetupError, match=message):
            await played(codec, environment, max_turns=2)


async def test_variables_of_the_chat_template_stand_in_every_turn(codec: TextCodec) -> None:
    bundle = codec.bundle
    quick = TextCodec(replace(bundle, chat_template=bundle.chat_template + "{{ opening }}"))
    source = ScriptedSource(codec, "add 1 1<|im_end|>", "0<|im_end|>", "2<|im_end|>")
    conversation = ChatEncoder(quick, {"opening": "So: "})
    await Episodes(source, Calculator(), conversation, EpisodeOptions("run", group_size=2, max_turns=2)).play(0, "p")
    for request, turns in zip(source.requests, (1, 2), strict=True):
        text = codec.decode(request.prompt_ids, skip_special_tokens=False)
        assert text.endswith("<|im_start|>assistant\nSo: ") and text.count("So: ") == turns


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a", "reference": 1}', "there is no `prompt` .*only 'text', 'reference'"),
        (b"{}", "there is no `prompt`"),
        (b'["a"]', "a task is an object"),
        (b'{"messages": []}', "`messages` is neither a text nor a list of messages"),
        (b'{"prompt": 5}', "`prompt` is neither"),
        (b'{"question": 5}', "`question` is not a text"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"prompt": ', "Expecting value"),
    ],
)
def test_a_line_without_a_task_is_named_with_its_field(tmp_path: Path, line: bytes, said: str) -> None:
    """It said: line 2: 'question'."""
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(SetupError, match=f"tasks.jsonl, line 2: .*{said}"):
        read_jsonl(path)
