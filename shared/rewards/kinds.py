"""The rewards that a job can ask for: their names and options. Their functions stand in functions.py.

A reward looks at the text of one completion and at the reference of its prompt (`JobInput.reference`). It gives a
value and named components, which are stored with the sample. Its options are checked once, where it enters, and nothing
heavy is imported for it; the job runner's processes do the work, or, for `judge` and `likelihood`, a served model.

`check` takes no time that depends on what a client wrote. Compiling a pattern may take half a minute, so that is apart:
`CheckedReward.compile` runs in a process that can be killed (`RewardPool.check`).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from shared.errors import InvalidRequestError
from shared.jobs import RewardSpec
from shared.rewards.model_kinds import (
    PROMPT,
    REFERENCE,
    JudgeOptions,
    LikelihoodOptions,
    ModelOptions,
    RewardModelOptions,
    models_of,
    needs,
)

MAX_PATTERN = 4_096
LARGEST = 1e100  # beyond it, rewards and their squares have sums that are no numbers


class ExactOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """1 when the completion equals the reference, or one of them when it is a list; else 0."""

    strip: bool = True  # ignore white space at both ends
    ignore_case: bool = False


class RegexOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """1 when the pattern is found in the completion, else 0. An empty pattern means that the reference is one.

    With `group`, what that group captured must equal the reference (white space at the ends ignored).
    """

    pattern: str = ""
    full: bool = False  # the whole completion must match
    ignore_case: bool = False
    dot_all: bool = True  # "." matches line ends too
    group: int | str | None = None

    def __post_init__(self) -> None:
        if self.group is not None and not self.pattern:
            raise ValueError("group needs a pattern")
        _check_length(self.pattern)

    @property
    def flags(self) -> re.RegexFlag:
        """The flags to compile the pattern with."""
        ignore_case = re.IGNORECASE if self.ignore_case else re.RegexFlag(0)
        return ignore_case | (re.DOTALL if self.dot_all else re.RegexFlag(0))

    def compile(self) -> None:
        """Try the pattern; ValueError when it is none, or has no such group."""
        compiled = _compiled(self.pattern, self.flags)
        if isinstance(self.group, int) and not 0 <= self.group <= compiled.groups:
            raise ValueError(f"the pattern has {compiled.groups} groups")
        if isinstance(self.group, str) and self.group not in compiled.groupindex:
            raise ValueError(f"the pattern has no group {self.group!r}")


class Gsm8kOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    r"""1 when the final number is the reference's, `format_score` when it is another one, 0 without a number.

    The final number follows the last `####`, or stands in the last `\boxed{}`, or is the last number of the text
    (unless `strict`). The reference is a number or the full answer text of GSM8K. `1,000`, `$5`, `3/4` and `2.50` are
    numbers; equal means equal in value.
    """

    strict: bool = False  # only the number after `####` counts
    format_score: float = 0.0


class MathOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """1 when the completion's final expression equals the reference (LaTeX or plain) mathematically, else 0.

    Decided by math-verify. Component `parsed` is 1 when an expression was found.
    """

    precision: int = 6  # decimal places of a numeric comparison
    format_score: float = 0.0  # when an expression was found and is not equal


class FormatOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Share of the wanted form that the completion has, from 0 to 1; each tag and the pattern count the same.

    A tag is right when `<tag>` and `</tag>` occur exactly once, in this order, after the previous right tag. With
    `all_or_nothing` anything short of the whole gives 0.
    """

    tags: tuple[str, ...] = ("think", "answer")
    pattern: str = ""  # must be found in the completion
    all_or_nothing: bool = False

    def __post_init__(self) -> None:
        if not self.tags and not self.pattern:
            raise ValueError("give tags, a pattern, or both")
        _check_length(self.pattern)

    def compile(self) -> None:
        """Try the pattern; ValueError when it is none."""
        _compiled(self.pattern, re.DOTALL)


class LengthOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """1 within the target, falling linearly to 0 (or to `floor`) when the length is `slack` beyond it.

    `at_most`: up to `target` is right. `near`: exactly `target` is right, and both directions cost.
    """

    target: int
    shape: Literal["at_most", "near"] = "at_most"
    unit: Literal["characters", "words"] = "characters"
    slack: int = 0  # 0: as much as the target
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.target < 1 or self.slack < 0:
            raise ValueError("target must be at least 1, slack at least 0")


class RewardPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One term of a weighted reward."""

    name: str
    weight: float = 1.0
    options: dict[str, Any] = {}


class WeightedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sum of other rewards, each times its weight; each part's value is a component under its name."""

    parts: tuple[RewardPart, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names) or "weighted" in names:
            raise ValueError("parts must be different rewards, at least one, and not weighted themselves")


Options = (
    ExactOptions | RegexOptions | Gsm8kOptions | MathOptions | FormatOptions | LengthOptions | WeightedOptions
    | ModelOptions
)  # fmt: skip


@dataclass(frozen=True)
class RewardKind:
    """One reward of the registry."""

    name: str
    options: type[Options]

    @property
    def description(self) -> str:
        """One sentence on how the reward is computed, from the docstring of its options."""
        return (self.options.__doc__ or "").strip()

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of its options."""
        return msgspec.json.schema(self.options)

    def form(self, given: Collection[str]) -> str:
        """Example of a reward with its required options, when they are not all given; "" if they are."""
        needed = [field.encode_name for field in msgspec.structs.fields(self.options) if field.required]
        if set(needed) <= set(given):
            return ""
        options = ", ".join(f'"{name}": ...' for name in needed)
        return f'; write it as {{"name": "{self.name}", "options": {{{options}}}}}'


REWARDS: dict[str, RewardKind] = {
    kind.name: kind
    for kind in (
        RewardKind("exact", ExactOptions),
        RewardKind("regex", RegexOptions),
        RewardKind("gsm8k", Gsm8kOptions),
        RewardKind("math", MathOptions),
        RewardKind("format", FormatOptions),
        RewardKind("length", LengthOptions),
        RewardKind("weighted", WeightedOptions),
        RewardKind("judge", JudgeOptions),
        RewardKind("likelihood", LikelihoodOptions),
        RewardKind("model", RewardModelOptions),
    )
}


class Score(NamedTuple):
    """Reward of one completion, with its components."""

    value: float
    components: dict[str, float] = {}  # noqa: RUF012 - a NamedTuple's default, never written


def wrong_with(value: float) -> str:
    """Reason why a number cannot be a reward; "" when it can."""
    return "" if abs(value) <= LARGEST else f"the reward is {value}, and {LARGEST:g} is the largest"


class CheckedReward(NamedTuple):
    """A reward of the registry with options that are right; `check` makes it."""

    spec: RewardSpec
    options: Options
    parts: "tuple[CheckedReward, ...]"  # of a weighted one

    @property
    def all_options(self) -> list[Options]:
        """Options of the reward, or those of each part of a mixture."""
        return [part.options for part in self.parts] or [self.options]

    @property
    def has_patterns(self) -> bool:
        """True if the reward has regular expressions to compile."""
        return any(isinstance(each, RegexOptions | FormatOptions) and each.pattern for each in self.all_options)

    def compile(self) -> None:
        """InvalidRequestError for a pattern that is none. It may take long: not for an event loop."""
        for options in self.all_options:
            if isinstance(options, RegexOptions | FormatOptions):
                try:
                    options.compile()
                except ValueError as error:
                    message = f"options of reward {self.spec.name!r}: {error}"
                    raise InvalidRequestError(message, param="reward.options") from error

    @property
    def needs_reference(self) -> bool:
        """True if the reward cannot be computed without a reference."""
        return any(_needs_reference(options) for options in self.all_options)

    @property
    def needs_prompt(self) -> bool:
        """True if the reward reads the prompt."""
        return any(isinstance(options, ModelOptions) and needs(options, PROMPT) for options in self.all_options)

    @property
    def served_models(self) -> tuple[str, ...]:
        """The models and adapters that must be served for this reward; none: it is computed without one."""
        asked = [models_of(options) for options in self.all_options if isinstance(options, ModelOptions)]
        return tuple(dict.fromkeys(name for names in asked for name in names))


def check(spec: RewardSpec) -> CheckedReward:
    """The reward with its options typed; InvalidRequestError for an unknown reward or option."""
    kind = REWARDS.get(spec.name)
    if kind is None:
        raise InvalidRequestError(f"no reward {spec.name!r}; there are {', '.join(REWARDS)}", param="reward.name")
    try:
        options: Options = msgspec.convert(spec.options, kind.options)
    except msgspec.ValidationError as error:
        message = f"options of reward {spec.name!r}: {error}{kind.form(spec.options)}"
        raise InvalidRequestError(message, param="reward.options") from error
    parts = options.parts if isinstance(options, WeightedOptions) else ()
    return CheckedReward(spec, options, tuple(check(RewardSpec(part.name, part.options)) for part in parts))


def _needs_reference(options: Options) -> bool:
    if isinstance(options, RegexOptions):
        return not options.pattern or options.group is not None
    if isinstance(options, ModelOptions):
        return needs(options, REFERENCE)
    return isinstance(options, ExactOptions | Gsm8kOptions | MathOptions)


def _check_length(pattern: str) -> None:
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"the pattern is longer than {MAX_PATTERN} characters")


def _compiled(pattern: str, flags: re.RegexFlag) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"bad pattern: {error}") from error
