"""Tasks to learn from: the source of prompts and the reward of answers.

An environment is stateless: `reset(index)` gives the task with that number, always the same one, and `step` gets the
observation back together with what the model wrote. All samples of a group start from one observation and part ways
from there. Multi-turn: `step` answers with further messages (a tool's result, a user's turn) and `done=False`; the
collector appends them, masks them out of the loss, and lets the model write again. With a `question` another policy
of the ring is asked, and `step` gets its answer, before the model goes on.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from shared.adapters import check_name
from shared.errors import InvalidRequestError, SetupError
from shared.jobs import Message
from shared.seeds import derived_seed
from trainer.rollouts.difficulty import DifficultyField, is_number
from trainer.tiny.data import Split, arithmetic_prompts

MOST_TOKENS, MOST_TEMPERATURE = 2**16, 100.0  # of an answer to an environment's question


@dataclass(frozen=True)
class Observation:
    """Input of the model: chat messages, or a text without a chat template. `info` is the environment's own."""

    prompt: str | tuple[Message, ...]
    info: Any = None
    difficulty: float | None = None  # of the task, on any scale, for `--curriculum difficulty`
    hint: str = ""  # what a teacher is told and the policy is not (teaching.py)
    tools: tuple[Message, ...] = ()  # offered to the model, as OpenAI's `tools`; actions are messages in JSON then


def hinted(observation: Observation) -> Observation:
    """The observation as a teacher reads it: its hint after the last message of the user, or before a text."""
    if isinstance(observation.prompt, str):
        return replace(observation, prompt=f"{observation.hint}\n\n{observation.prompt}")
    messages = list(observation.prompt)
    at = max((at for at, each in enumerate(messages) if each.get("role") == "user"), default=None)
    if at is None or not isinstance(messages[at].get("content"), str):
        raise SetupError("a hint follows the text of a user's message, and this prompt has none")
    messages[at] = messages[at] | {"content": f"{messages[at]['content']}\n\n{observation.hint}"}
    return replace(observation, prompt=tuple(messages))


@dataclass(frozen=True)
class Question:
    """Question of an environment to another policy of the ring; it goes through the queue, as everything does."""

    policy: str  # a name: its newest version (the base, before it has one); name@k: that version; "": the base
    messages: tuple[Message, ...]  # the whole chat
    max_tokens: int = 256
    temperature: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """Result of an action: its reward, and the next messages if the episode is not done."""

    reward: float | None  # of this step; an episode's reward is the sum. None: the generator has scored it
    done: bool = True
    messages: tuple[Message, ...] = ()  # that follow the action when not done
    info: Any = None  # replaces the observation's
    components: dict[str, float] = field(default_factory=dict)
    question: Question | None = None  # its answer is the next action, with `info`; neither is in the conversation


class Environment(Protocol):
    """Interface that a user's own environment implements."""

    name: str

    async def reset(self, index: int) -> Observation:
        """Task number `index`, from 0 without end."""

    async def step(self, observation: Observation, action: str) -> Outcome:
        """Judge the model's reply, and continue the episode if there is more to do."""


Scored = tuple[float, dict[str, float]]  # the reward and its named components
Scorer = Callable[[str, Any, str | Sequence[Message]], Awaitable[Scored]]  # of completion, reference and prompt


class ArithmeticEnvironment:
    """Two-digit additions of `trainer.tiny.data`: 1 for exactly the right number, else 0.

    `count` above 0 repeats the same `count` tasks.
    """

    name = "arithmetic"

    def __init__(self, seed: int = 0, split: Split = "train", count: int = 0) -> None:
        self._seed, self._split, self.count = seed, split, count

    async def reset(self, index: int) -> Observation:
        """An addition as a user asks it."""
        if self.count:
            index %= self.count
        (task,) = arithmetic_prompts(1, derived_seed(self._seed, self._split, index), self._split)
        hint = f"The answer is {task.answer}."
        return Observation(({"role": "user", "content": task.question},), info=task.answer, hint=hint)

    async def step(self, observation: Observation, action: str) -> Outcome:
        """1 when the whole reply is the number, else 0."""
        return Outcome(float(action == observation.info))


@dataclass(frozen=True)
class Task:
    """One line of a data set."""

    prompt: str | tuple[Message, ...]
    reference: Any
    difficulty: float | None = None
    hint: str = ""


class DatasetEnvironment:
    """A data set in a drawn order, another one each epoch; single-turn, scored by `scorer`."""

    def __init__(self, name: str, tasks: list[Task], scorer: Scorer, seed: int = 0, system_prompt: str = "") -> None:
        if not tasks:
            raise SetupError(f"{name}: the data set is empty")
        self.name, self.count = name, len(tasks)
        self._tasks, self._scorer, self._seed = tasks, scorer, seed
        self._system = (_message("system", system_prompt),) if system_prompt else ()
        self._orders: dict[int, list[int]] = {}

    async def reset(self, index: int) -> Observation:
        """The next task of the epoch that `index` falls into."""
        epoch, place = divmod(index, len(self._tasks))
        if epoch not in self._orders:
            order = sorted(range(len(self._tasks)), key=lambda i: derived_seed(self._seed, epoch, i))
            self._orders = {epoch: order}
        task = self._tasks[self._orders[epoch][place]]
        if self._system and not isinstance(task.prompt, str):
            return Observation((*self._system, *task.prompt), task.reference, task.difficulty, task.hint)
        return Observation(task.prompt, task.reference, task.difficulty, task.hint)

    async def step(self, observation: Observation, action: str) -> Outcome:
        """Score the reply by the data set's reward."""
        value, components = await self._scorer(action, observation.info, observation.prompt)
        return Outcome(value, components=components)


def read_jsonl(path: Path, limit: int = 0, difficulty: DifficultyField | None = None) -> list[Task]:
    """Tasks from JSON lines: `prompt` (text or messages), or `question` as in GSM8K; `reference`, or `answer`; `hint`.

    With `difficulty` each line has to say how hard its task is.
    """
    if not path.is_file():
        raise SetupError(f"no data set {path}")
    tasks: list[Task] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                tasks.append(_task(json.loads(line.decode()), difficulty))
            except ValueError as error:
                raise SetupError(f"{path}, line {number}: {error}") from error
            if limit and len(tasks) == limit:
                break
    return tasks


def load_class(path: str, options: Mapping[str, Any]) -> Environment:
    """An environment class of the user's own, named `module:Class`, built with `options`."""
    try:
        environment = load_object(path, "environment")(**options)
    except TypeError as error:
        raise SetupError(f"environment {path!r}: {error}; its options stand in task_options") from error
    missing = [name for name in ("reset", "step") if not inspect.iscoroutinefunction(getattr(environment, name, None))]
    if missing:
        raise SetupError(f"environment {path!r} needs `async def {missing[0]}`: see trainer/rollouts/environments.py")
    if not isinstance(getattr(environment, "name", None), str):
        raise SetupError(f"environment {path!r} needs a `name`")
    return cast(Environment, environment)


def load_object(path: str, what: str) -> Callable[..., Any]:
    """Import `package.module:name`, from the working directory too; SetupError when it does not exist."""
    module, _, attribute = path.partition(":")
    if "" not in sys.path:  # a console script does not look there by itself
        sys.path.insert(0, "")
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(f"{what} {path!r}: {error}; write it as package.module:Name") from error
    if not callable(value):
        raise SetupError(f"{what} {path!r} is not callable")
    return cast(Callable[..., Any], value)


def is_observation(name: str, given: object) -> Observation:
    """Check the result of `reset`; SetupError when it is not an observation."""
    if not isinstance(given, Observation):
        said = f"`reset` gave {given!r:.80}, not a trainer.rollouts.environments.Observation"
        raise SetupError(f"environment {name!r}: {said}")
    if given.difficulty is not None and not is_number(given.difficulty):
        raise SetupError(f"environment {name!r}: `reset` gave the difficulty {given.difficulty!r:.80}, not a number")
    return given


def is_outcome(name: str, given: object) -> Outcome:
    """Check the result of `step`; SetupError when it is not an outcome."""
    if not isinstance(given, Outcome):
        said = f"`step` gave {given!r:.80}, not a trainer.rollouts.environments.Outcome"
        raise SetupError(f"environment {name!r}: {said}")
    return given


def wrong_with_question(question: Question) -> str:
    """Reason why a question is refused; "" when it may be asked."""
    name, _, version = question.policy.partition("@")
    if name:
        try:
            check_name(name)
        except InvalidRequestError as error:
            return str(error)
    if "@" in question.policy and not (name and version.isdecimal()):
        return f"the policy {question.policy[:80]!r} is NAME, NAME@VERSION or empty"
    if not question.messages:
        return "it has no messages"
    if not 1 <= question.max_tokens <= MOST_TOKENS:
        return f"max_tokens {question.max_tokens}, they are 1 to {MOST_TOKENS}"
    if not 0 <= question.temperature <= MOST_TEMPERATURE:
        return f"temperature {question.temperature}, it is 0 to {MOST_TEMPERATURE:g}"
    return ""


def _task(line: Any, difficulty: DifficultyField | None) -> Task:
    """ValueError that names the field."""
    if not isinstance(line, dict):
        raise ValueError(f'a task is an object such as {{"prompt": ..., "reference": ...}}, not {line!r:.80}')
    field = next((name for name in ("prompt", "messages", "question") if line.get(name) is not None), "")
    if not field:
        has = f"only {', '.join(map(repr, line))[:200]}" if line else "nothing"
        raise ValueError(f"there is no `prompt` (nor `messages`, nor `question` as in GSM8K), {has}")
    prompt, reference = line[field], line.get("reference", line.get("answer"))
    if field == "question":
        if not isinstance(prompt, str):
            raise ValueError("`question` is not a text")
        prompt = [_message("user", prompt)]
    hardness = difficulty.read(line) if difficulty is not None else None
    hint = line.get("hint") or ""
    if not isinstance(hint, str):
        raise ValueError("`hint` is not a text")
    if isinstance(prompt, str):
        return Task(prompt, reference, hardness, hint)
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and "role" in m for m in prompt):
        raise ValueError(f"`{field}` is neither a text nor a list of messages")
    return Task(tuple(prompt), reference, hardness, hint)


def _message(role: Literal["user", "assistant", "tool", "system"], content: str) -> Message:
    return {"role": role, "content": content}
