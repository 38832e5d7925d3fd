"""POST /v1/classifications: which of some labels the served model finds most likely behind each input."""

import time
import uuid
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.generation.continuations import check_pairs, log_probabilities
from api.generation.plan import encoded
from api.generation.target import TargetFields, target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import Off, complaint
from api.openai.embeddings import prompt_usage
from api.ring.ring import TheRing
from shared.errors import InvalidRequestError
from shared.rewards.model_kinds import softmax

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_PLACE = "{input}"


class ClassificationRequest(TargetFields):
    """POST /v1/classifications."""

    input: str | list[str] = Field(description="one text, or several")
    labels: list[Annotated[str, Field(min_length=1)]] = Field(min_length=2, max_length=256)
    template: str = Field(
        default=f"{_PLACE}\n\nLabel: ",
        description=f"the prompt: {_PLACE} is where the text goes, and the label is what would follow",
    )

    @model_validator(mode="after")
    def _possible(self) -> "ClassificationRequest":
        if _PLACE not in self.template:
            raise complaint("template", f"a template has {_PLACE} in it")
        if len(set(self.labels)) < len(self.labels):
            raise complaint("labels", "two labels are the same")
        if not self.input:
            raise complaint("input", "nothing to classify")
        return self


class ClassifyRequest(ClassificationRequest):
    """POST /classify: vLLM's, of models with a classifier; here labels take its place."""

    off: ClassVar[Off] = {
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "priority": (0,),
        "use_activation": (True,),
        "add_special_tokens": (True,),
        "request_id": (),
    }

    @model_validator(mode="before")
    @classmethod
    def _labels(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("labels") is None:
            raise complaint("labels", "the models served here have no classifier: give 'labels' of your own, as texts")
        return data


@router.post("/classify", summary="Classify texts (vLLM)", responses=error_responses())
async def classify(body: ClassifyRequest, request: Request, ring: TheRing) -> Response:
    """As /v1/classifications."""
    return await create_classifications(body, request, ring)


@router.post(
    "/v1/classifications",
    summary="Classify texts by labels of your own",
    responses=error_responses(
        ok="For each input the most likely label and the probabilities of all, in `labels`' order"
    ),
)
async def create_classifications(body: ClassificationRequest, request: Request, ring: TheRing) -> Response:
    """Zero-shot: P(label | prompt), exact, over the labels given. The shape is vLLM's /classify with `labels`."""
    target = await target_of(ring, body, request)
    codec = target.served.codec
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_pairs(len(texts), len(body.labels), "input")
    prompts = await encoded(codec, _filled(body.template, texts, ring.settings.max_request_bytes))
    labels = await encoded(codec, body.labels, add_special_tokens=False)
    scores = await log_probabilities(ring, target, prompts, labels, "input")
    return json_reply(
        {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or target.served.card.name,
            "labels": body.labels,
            "data": [_shown(at, body.labels, softmax(each)) for at, each in enumerate(scores)],
            "usage": prompt_usage(prompts),
        }
    )


def _filled(template: str, texts: list[str], most: int) -> list[str]:
    """The prompts; refused before they are written when a short body would make very long ones."""
    places = template.count(_PLACE)
    chars = sum(len(template) + places * len(text) for text in texts)
    if chars > most:
        raise InvalidRequestError(
            f"the template makes prompts of {chars} characters in all, and at most {most} are taken "
            "(--max-request-bytes)",
            param="template",
        )
    return [template.replace(_PLACE, text) for text in texts]


def _shown(index: int, labels: list[str], chances: list[float]) -> dict[str, object]:
    best = max(range(len(labels)), key=chances.__getitem__)
    return {"index": index, "label": labels[best], "probs": chances, "num_classes": len(labels)}
