"""POST /v1/classifications: which of some labels each input has.

Labels of the request are compared by how likely the served model finds them after the input. Without any, the model's
own head of labels decides: that of its adapter version, or of a classifier that is served.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.generation.continuations import check_pairs, log_probabilities
from api.generation.heads import read_by_head, wanted_head
from api.generation.plan import check_prompts, encoded
from api.generation.target import Target, TargetFields, target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import Off, complaint
from api.openai.embeddings import prompt_usage
from api.ring.ring import Ring, TheRing
from shared.errors import InvalidRequestError
from shared.rewards.model_kinds import softmax

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_PLACE = "{input}"


class ClassificationRequest(TargetFields):
    """Body of POST /v1/classifications and POST /classify."""

    input: str | list[str] = Field(description="one text, or several")
    labels: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, min_length=2, max_length=256, description="without: the labels of the model's own head"
    )
    template: str | None = Field(
        default=None,
        description=f"the prompt: {_PLACE} is where the text goes, and a label of `labels` is what would follow; "
        f"default: `{_PLACE}`, with `labels` an empty line and `Label: ` after it",
    )
    head: str | None = Field(default=None, description="the head that decides, where the model has several of labels")

    @model_validator(mode="after")
    def _possible(self) -> "ClassificationRequest":
        if self.template is not None and _PLACE not in self.template:
            raise complaint("template", f"a template has {_PLACE} in it")
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            raise complaint("labels", "two labels are the same")
        if self.labels is not None and self.head is not None:
            raise complaint("head", "a head has its own labels: give 'head' or 'labels'")
        if not self.input:
            raise complaint("input", "nothing to classify")
        return self

    @property
    def texts(self) -> list[str]:
        """The texts that are to be classified."""
        return [self.input] if isinstance(self.input, str) else self.input


class ClassifyRequest(ClassificationRequest):
    """POST /classify: vLLM's, of models with a classifier; where there is none, labels take its place."""

    off: ClassVar[Off] = {
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "priority": (0,),
        "use_activation": (True,),
        "add_special_tokens": (True,),
        "request_id": (),
    }


@router.post("/classify", summary="Classify texts (vLLM)", responses=error_responses())
async def classify(body: ClassifyRequest, request: Request, ring: TheRing) -> Response:
    """The same as POST /v1/classifications, under vLLM's path."""
    return await create_classifications(body, request, ring)


@router.post(
    "/v1/classifications",
    summary="Classify texts",
    responses=error_responses(
        ok="For each input the most likely label and the probabilities of all, in `labels`' order"
    ),
)
async def create_classifications(body: ClassificationRequest, request: Request, ring: TheRing) -> Response:
    """P(label | prompt) over the labels given, exact, or what a head of labels says. vLLM's shape, with `labels`."""
    target = await target_of(ring, body, request)
    ring = target.ring
    if body.labels is None:
        return await _by_head(body, target, ring)
    codec, texts = target.served.codec, body.texts
    check_pairs(len(texts), len(body.labels), "input")
    template = body.template or f"{_PLACE}\n\nLabel: "
    prompts = await encoded(codec, _filled(template, texts, ring.settings.max_request_bytes))
    labels = await encoded(codec, body.labels, add_special_tokens=False)
    scores = await log_probabilities(ring, target, prompts, labels, "input")
    return _reply(body, target, body.labels, scores, prompts)


async def _by_head(body: ClassificationRequest, target: Target, ring: Ring) -> Response:
    try:
        head, spec = await wanted_head(ring, target, "labels", body.head or "")
    except InvalidRequestError as error:
        if body.head is None and error.param == "model":
            error.message = f"no classifier: {error.message}; or give 'labels' of your own, as texts"
            error.param = "labels"
        raise
    check_pairs(len(body.texts), len(spec.labels), "input")
    prompts = await encoded(
        target.served.codec, _filled(body.template or _PLACE, body.texts, ring.settings.max_request_bytes)
    )
    check_prompts(prompts, target.served.card, ring.settings, "input")
    scores = [outputs.tolist() for outputs in await read_by_head(ring, target, head, prompts)]
    return _reply(body, target, spec.labels, scores, prompts)


def _reply(
    body: ClassificationRequest,
    target: Target,
    labels: Sequence[str],
    scores: Sequence[Sequence[float]],
    prompts: Sequence[Sequence[int]],
) -> Response:
    return json_reply(
        {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or target.served.card.name,
            "labels": labels,
            "data": [_shown(at, labels, softmax(each)) for at, each in enumerate(scores)],
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


def _shown(index: int, labels: Sequence[str], chances: list[float]) -> dict[str, object]:
    best = max(range(len(labels)), key=chances.__getitem__)
    return {"index": index, "label": labels[best], "probs": chances, "num_classes": len(labels)}
