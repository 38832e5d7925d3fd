"""POST /v1/rewards/score: what the reward registry says of texts, at once. For thousands use a job of kind score.

Functions run in a job runner's pool of processes; a judge, a likelihood and a reward model are asked through the queue,
in the class of the caller's key, and cancelled when the client leaves.
"""

from typing import Any

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.responses import Response

from api.callers.caller import calling, key_name, while_wanted
from api.generation.collection import check_scoring, named_scoring, scoring_reward
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import RequestModel, complaint
from api.openai.bodies import ChatMessage
from api.openai.conversations import template_messages
from api.ring.ring import TheRing
from shared.errors import InvalidRequestError
from shared.jobs import Prompt
from shared.rewards.kinds import CheckedReward
from shared.scoring.pool import RewardSample
from shared.scoring.shares import Share

router = APIRouter(tags=["training"], route_class=BodyRoute)
Question = str | list[ChatMessage]

MAX_TEXTS = 1024
ASKING = ("judge", "likelihood", "model")  # rewards that `model` goes to


class ScoreBody(RequestModel):
    """Texts and what to score them by."""

    completions: str | list[str] = Field(description="one text, or up to 1,024")
    prompts: Question | list[Question] | None = Field(
        default=None, description="what they answer: a text or messages; one for all, or a list with one for each"
    )
    references: Any = Field(default=None, description="what to compare with: a list, one for each of several texts")
    reward: str | dict[str, Any] | None = Field(default=None, description="a reward's name, or an object with options")
    scoring_function: str | dict[str, Any] | None = Field(default=None, description="the same as `reward`")
    model: str | None = Field(
        default=None, description="the reward model: `model` of the reward; alone it asks the reward `judge` of it"
    )

    @model_validator(mode="after")
    def _whole(self) -> "ScoreBody":
        if self.reward is not None and self.scoring_function is not None:
            raise complaint("reward", "give one of 'reward' and 'scoring_function'")
        if self.reward is None and self.scoring_function is None and self.model is None:
            raise complaint("reward", "give 'reward' (or 'scoring_function'), or the 'model' that judges")
        if isinstance(self.completions, list):
            if not 1 <= len(self.completions) <= MAX_TEXTS:
                raise complaint("completions", f"1 to {MAX_TEXTS} texts; use /v1/jobs for more")
            several = isinstance(self.references, list) and len(self.references) == len(self.completions)
            if self.references is not None and not several:
                raise complaint("references", "a list with one reference for each of 'completions'")
        if self.prompts is not None and len(self.questions) != len(self.texts):
            raise complaint("prompts", "one prompt for all, or a list with one for each of 'completions'")
        return self

    @property
    def texts(self) -> list[str]:
        """The completions that are to be scored."""
        return [self.completions] if isinstance(self.completions, str) else self.completions

    @property
    def questions(self) -> list[Prompt | None]:
        """The prompt of each text."""
        given = self.prompts
        if given is None or isinstance(given, str):
            return [given] * len(self.texts)
        messages = [each for each in given if isinstance(each, ChatMessage)]
        if messages:
            return [template_messages(messages)] * len(self.texts)
        each_own = [each for each in given if not isinstance(each, ChatMessage)]
        return [each if isinstance(each, str) else template_messages(each) for each in each_own]

    def checked(self) -> CheckedReward:
        """The reward with its options checked."""
        param = "scoring_function" if self.scoring_function is not None else "reward"
        given = self.reward or self.scoring_function or ("" if self.model is None else ASKING[0])
        if self.model is None:
            return scoring_reward(given, param)
        spec = named_scoring(given, param)
        if spec.name not in ASKING:
            raise InvalidRequestError(f"only {', '.join(ASKING)} ask a model", param="model")
        if spec.options.get("model", self.model) != self.model:
            raise InvalidRequestError(f"'model' and the model of '{param}' differ", param="model")
        return scoring_reward({**spec.options, "name": spec.name, "model": self.model}, param)

    def samples(self, reward: CheckedReward) -> list[RewardSample]:
        """Inputs of the reward; InvalidRequestError when something that it needs is missing."""
        references = [self.references] if isinstance(self.completions, str) else self.references
        references = [None] * len(self.texts) if references is None else references
        name = reward.spec.name
        if reward.needs_prompt and self.prompts is None:
            raise InvalidRequestError(f"reward '{name}' looks at the prompt: give 'prompts'", param="prompts")
        if reward.needs_reference and (bare := [i for i, reference in enumerate(references) if reference is None]):
            raise InvalidRequestError(
                f"reward '{name}' compares with a reference, and references[{bare[0]}] is not there",
                param="references",
            )
        return [RewardSample(*each) for each in zip(self.texts, references, self.questions, strict=True)]


@router.post(
    "/v1/rewards/score",
    summary="Score texts",
    response_class=Response,
    responses=error_responses(400, 404, 413, 429, 503, ok="A score for each text"),
)
async def score(body: ScoreBody, ring: TheRing) -> Response:
    """One score for each text; `error` says why there is none."""
    reward = body.checked()
    samples = body.samples(reward)
    for card in await check_scoring(ring, reward, "model" if body.model is not None else "reward"):
        await ring.served(card.name)  # 503 without a live worker
        await ring.check_memory(card.name)
    key = calling.get()
    scoring = ring.rewards.score(
        reward,
        samples,
        within_s=ring.settings.request_timeout_s,
        sequence_class="interactive" if key is None else key.sequence_class,
        share=Share(key_name()),
    )
    rewards = await while_wanted(scoring)
    values = [reward.value for reward in rewards if reward.value is not None]
    return json_reply(
        {
            "object": "list",
            "reward": reward.spec.name,
            "data": [
                {"object": "reward", "index": i, "score": r.value, "components": r.components, "error": r.error or None}
                for i, r in enumerate(rewards)
            ],
            "mean_score": sum(values) / len(values) if values else None,
        }
    )
