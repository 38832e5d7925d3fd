"""Options of the rewards that a served model gives: a judge's mark, a likelihood (done in shared/scoring/served.py).

A template is a text in which `{prompt}`, `{completion}` and `{reference}` stand for what is scored; other braces are
plain text. `model` is a served model, an adapter (its latest version) or a version of one (`name@k`).
"""

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from shared.adapters import AdapterRef
from shared.errors import InvalidRequestError
from shared.heads import MAX_LABEL

PROMPT, COMPLETION, REFERENCE = "{prompt}", "{completion}", "{reference}"
MAX_TEMPLATE = 65_536
MAX_MARKS = 32
MAX_RATIONALE = 4_096
_PLACE = re.compile("|".join(map(re.escape, (PROMPT, COMPLETION, REFERENCE))))
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

JUDGE_TEMPLATE = f"""You judge an answer.

Question:
{PROMPT}

Answer:
{COMPLETION}

How good is the answer, from 1 (wrong or useless) to 5 (right and complete)? Reply with "Mark: " and the number."""

JUDGE_MARKS = {"1": 0.0, "2": 0.25, "3": 0.5, "4": 0.75, "5": 1.0}


class JudgeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mark that a served model gives: each mark's value times its exact probability behind the judge's prompt.

    `template` is the judge's one user message (plain text for a model without a chat template), and `lead` how its
    answer begins. With `rationale_tokens` it first writes so much by itself, greedily. The marks' probabilities are
    normalised over the marks; components name each. Nothing is drawn, so the same texts get the same value.
    """

    model: str
    template: str = JUDGE_TEMPLATE
    marks: dict[str, float] = msgspec.field(default_factory=lambda: dict(JUDGE_MARKS))
    lead: str = "Mark: "
    system: str = ""
    rationale_tokens: int = 0
    chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _check_model(self.model, "model")
        _check_templates(self.template, self.lead, self.system)
        if COMPLETION not in self.template:
            raise ValueError(f"the template has no {COMPLETION}: the judge would not see what it judges")
        if not 2 <= len(self.marks) <= MAX_MARKS:
            raise ValueError(f"marks must be 2 to {MAX_MARKS}")
        for mark, value in self.marks.items():
            if not mark or len(mark) > 64 or not math.isfinite(value):
                raise ValueError(f"mark {mark[:64]!r}: a text of 1 to 64 characters and a finite number")
        shortest_first = sorted(self.marks)
        for mark, longer in itertools.pairwise(shortest_first):
            if longer.startswith(mark):
                raise ValueError(
                    f"mark {longer!r} begins with mark {mark!r}: the one's probability has the other's in it"
                )
        if not 0 <= self.rationale_tokens <= MAX_RATIONALE:
            raise ValueError(f"rationale_tokens must be 0 to {MAX_RATIONALE}")
        if wrong := sorted(self.chat_template_kwargs.keys() & OWN_VARIABLES):
            raise ValueError(f"{wrong[0]!r} is not a template variable of its own")


class LikelihoodOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`scale` times the log-probability that a served model gives `target` behind `template`, per token or in all.

    With `against` that model's is subtracted: a DPO-trained adapter against its base is an implicit reward model. The
    default template is the prompt itself; a chat goes through the model's chat template.
    """

    model: str
    template: str = PROMPT
    target: str = COMPLETION
    against: str = ""
    per_token: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_model(self.model, "model")
        if self.against:
            _check_model(self.against, "against")
        _check_templates(self.template, self.target)
        if not any(place in self.target for place in (COMPLETION, REFERENCE)):
            raise ValueError(f"the target has neither {COMPLETION} nor {REFERENCE}")
        if COMPLETION not in self.template + self.target:
            raise ValueError(f"neither template nor target has {COMPLETION}: every text would score the same")
        if not math.isfinite(self.scale):
            raise ValueError("scale must be a finite number")


class RewardModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`scale` times the number that a reward model's head gives the prompt with its completion, at the last token.

    The head is a scalar one: the one called `reward`, or the only one. With `label` it is one of labels, and the number
    is that label's probability. A chat goes through the model's chat template; without a prompt the text is read alone.
    """

    model: str
    head: str = ""
    label: str = ""
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_model(self.model, "model")
        if len(self.head) > 64 or len(self.label) > MAX_LABEL:
            raise ValueError("head and label are the names of what the model has")
        if not math.isfinite(self.scale):
            raise ValueError("scale must be a finite number")


ModelOptions = JudgeOptions | LikelihoodOptions | RewardModelOptions


def models_of(options: ModelOptions) -> tuple[str, ...]:
    """The models that must be served for it."""
    if isinstance(options, LikelihoodOptions) and options.against:
        return options.model, options.against
    return (options.model,)


def needs(options: ModelOptions, place: str) -> bool:
    """True if the reward's template or target contains the placeholder PROMPT or REFERENCE."""
    if isinstance(options, RewardModelOptions):
        return False
    texts = (options.template, options.target) if isinstance(options, LikelihoodOptions) else (options.template,)
    return any(place in text for text in texts)


def lacks(options: ModelOptions, prompt: object, reference: object) -> str:
    """Reason why a sample does not fill the template; "" when it does."""
    if prompt is None and needs(options, PROMPT):
        return "the template wants a prompt, and there is none"
    if reference is None and needs(options, REFERENCE):
        return "the template wants a reference, and there is none"
    return ""


def filled(template: str, prompt: str, completion: str, reference: str) -> str:
    """The template with its places filled in one pass: a place that stands in a filled-in text stays as it is."""
    texts = {PROMPT: prompt, COMPLETION: completion, REFERENCE: reference}
    return _PLACE.sub(lambda place: texts[place[0]], template)


def softmax(scores: Iterable[float], temperature: float = 1.0) -> list[float]:
    """Chances in proportion to exp(score / temperature)."""
    scores = list(scores)
    top = max(scores)
    weights = [math.exp((score - top) / temperature) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def _check_model(name: str, field: str) -> None:
    if not name or len(name) > 256:
        raise ValueError(f"{field}: the name of a served model or an adapter")
    if "," in name or ":" in name:
        raise ValueError(f"{field}: one model or one version, not a split")
    if "@" in name:
        try:
            AdapterRef.parse(name)
        except InvalidRequestError as error:
            raise ValueError(f"{field}: {error}") from error


def _check_templates(*texts: str) -> None:
    if any(len(text) > MAX_TEMPLATE for text in texts):
        raise ValueError(f"a text of more than {MAX_TEMPLATE} characters")
