"""Examples that a head learns from: JSON lines of one form, as token ids.

**pairs** `{"prompt"?, "chosen", "rejected"}`: a scalar head, the chosen answer above the rejected one (Bradley-Terry).
**scores** `{"prompt"?, "completion", "score"}`: a scalar head, squared error. **labels** `{"prompt"?, "completion",
"label"}`: a head of labels, cross entropy. `prompt` is a text or messages; an answer is a text, or a whole conversation
of messages that ends with it. What is read of them is what the reward `model` reads (shared/text/codec.py:answered).

**actions** `{"observation", "action": "left", "weight"?}`: a categorical head, and **vectors** `{"observation",
"action": [0.1, -0.3], "weight"?}`: a gaussian one, by the actions' log-probability. An observation is a text or
messages, and what is read of it is what `/v1/rl/act` reads.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequestError, SetupError
from shared.jobs import Message
from shared.text.codec import TextCodec, answered
from trainer.learners.lines import exchange, read_lines
from trainer.rollouts.pictures import has_images

Floats = npt.NDArray[np.float32]
Form = Literal["pairs", "scores", "labels", "actions", "vectors"]
ACTING: tuple[Form, ...] = ("actions", "vectors")  # whose head acts

MAX_NUMBER = 1e15  # of an action, whichever its sign: squares of it are still float32
_LEAST_STD, _LEAST_PART = 1e-30, 2.0**-16  # of a spread, and of it as a part of the mean: less is lost in float32


class HeadText(NamedTuple):
    """A prompt with its answer."""

    prompt: str | list[Message] | None
    answer: str
    ids: tuple[int, ...]


class HeadExample(NamedTuple):
    """One line: one text, or the chosen one and the rejected one; its score, or the index of its label or action."""

    texts: tuple[HeadText, ...]
    target: float = 0.0
    action: tuple[float, ...] = ()  # of form "vectors", instead of the target
    weight: float = 1.0  # how much it counts


class HeadExamples(NamedTuple):
    """A data set for a head."""

    form: Form
    items: tuple[HeadExample, ...]
    labels: tuple[str, ...] = ()
    too_long: int = 0  # left out


class ActionSpread(NamedTuple):
    """Mean and standard deviation of each dimension of the actions in a data set."""

    means: tuple[float, ...]
    stds: tuple[float, ...]  # where all are the same, as far as float32 can tell, 1 or what it can tell

    @property
    def scale(self) -> Floats:
        """Factor by which a gaussian head's outputs are scaled: deviations for the means, 1 for the log deviations."""
        return np.array([*self.stds, *[1.0] * len(self.stds)], np.float32)

    @property
    def shift(self) -> Floats:
        """Offset that is added to a gaussian head's scaled outputs."""
        return np.array([*self.means, *np.log(self.stds)], np.float32)


def spread_of(examples: Sequence[HeadExample]) -> ActionSpread:
    """Compute the spread of actions that are vectors."""
    actions_NA = np.array([example.action for example in examples])
    means_A, stds_A = actions_NA.mean(axis=0), actions_NA.std(axis=0)
    least_A = np.maximum(_LEAST_STD, _LEAST_PART * np.abs(means_A))
    stds_A = np.where(stds_A > least_A, stds_A, np.maximum(1.0, least_A))
    return ActionSpread(tuple(means_A.tolist()), tuple(stds_A.tolist()))


class _Line(msgspec.Struct, frozen=True):
    prompt: str | list[Message] | None = None
    chosen: str | list[Message] | None = None
    rejected: str | list[Message] | None = None
    completion: str | list[Message] | None = None
    score: float | None = None
    label: str | None = None
    observation: str | list[Message] | None = None
    action: str | list[float] | None = None
    weight: float | None = None

    @property
    def form(self) -> Form:
        """Form of the line, by the fields that it has; ValueError when they are of no form."""
        if self.observation is not None and self.action is not None:
            return "actions" if isinstance(self.action, str) else "vectors"
        if self.chosen is not None and self.rejected is not None:
            return "pairs"
        if self.completion is not None and self.score is not None:
            return "scores"
        if self.completion is not None and self.label:
            return "labels"
        raise ValueError(
            "neither 'chosen' and 'rejected', nor 'completion' with 'score' or 'label', nor 'observation' and 'action'"
        )

    @property
    def named(self) -> str:
        """Label of the line, or the name of its action; "": it has neither."""
        return self.action if isinstance(self.action, str) else self.label or ""


_line = msgspec.json.Decoder(_Line)


def read_examples(path: Path, codec: TextCodec, longest: int, labels: Sequence[str] = ()) -> HeadExamples:
    """The examples of a file; SetupError names the line.

    `labels`: those, or the names of actions, that there may be; none: those of the file.
    """
    lines = read_lines(path, _line)
    try:
        form = lines[0][1].form
    except ValueError as error:
        raise SetupError(f"{path}, line {lines[0][0]}: {error}") from error
    known = tuple(labels) or tuple(sorted({line.named for _, line in lines if line.named}))
    items: list[HeadExample] = []
    for number, line in lines:
        try:
            if line.form != form:
                raise ValueError(f"one of {line.form} among {form}")
            items.append(_example(line, form, codec, known))
            if len(items[-1].action) != len(items[0].action):
                raise ValueError(f"an action of {len(items[-1].action)} numbers among those of {len(items[0].action)}")
        except (ValueError, InvalidRequestError) as error:
            raise SetupError(f"{path}, line {number}: {error}") from error
    fitting = tuple(item for item in items if all(0 < len(text.ids) <= longest for text in item.texts))
    if not fitting:
        if all(any(not text.ids for text in item.texts) for item in items):
            raise SetupError(f"{path}: each example has a text without tokens")
        raise SetupError(f"{path}: no text has at most {longest} tokens, which is the model's context")
    return HeadExamples(form, fitting, known if form in ("labels", "actions") else (), len(items) - len(fitting))


def _example(line: _Line, form: Form, codec: TextCodec, labels: Sequence[str]) -> HeadExample:
    if line.weight is not None and (form not in ACTING or not 0 < line.weight <= MAX_NUMBER):
        raise ValueError("'weight' is a number above 0, of an 'action'")
    if form == "pairs":
        return HeadExample((_text(line.prompt, line.chosen, codec), _text(line.prompt, line.rejected, codec)))
    text = _observed(line.observation, codec) if form in ACTING else _text(line.prompt, line.completion, codec)
    if form == "scores":
        return HeadExample((text,), float(line.score or 0.0))
    weight = 1.0 if line.weight is None else line.weight
    if isinstance(line.action, list) and form == "vectors":
        if not line.action or any(abs(number) > MAX_NUMBER for number in line.action):
            raise ValueError(f"'action' is a name, or numbers of at most {MAX_NUMBER:g}")
        return HeadExample((text,), action=tuple(line.action), weight=weight)
    if not line.named or line.named not in labels:
        raise ValueError(f"{'action' if form in ACTING else 'label'} {line.named!r} is none of {', '.join(labels)}")
    return HeadExample((text,), float(labels.index(line.named)), weight=weight)


def _observed(observation: Any, codec: TextCodec) -> HeadText:
    """Ids as `/v1/rl/act` makes them: a chat by the model's template, with the beginning of an answer."""
    _check_text(observation)
    ids = codec.encode(observation) if isinstance(observation, str) else codec.encode_chat(observation)
    return HeadText(observation, "", tuple(ids))


def _check_text(prompt: Any) -> None:
    if isinstance(prompt, list) and has_images(prompt):
        raise ValueError("a head does not learn from images")


def _text(prompt: str | list[Message] | None, answer: Any, codec: TextCodec) -> HeadText:
    asked, said = exchange(prompt, answer)
    _check_text(asked)
    return HeadText(asked, said, tuple(answered(codec, asked, said)))
