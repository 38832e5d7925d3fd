"""GET /v1/models: the models that a live worker serves."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from api.errors import error_responses
from api.ring import Ring, ring_of
from shared.errors import UnknownModelError
from shared.sequences import ModelCard

router = APIRouter(tags=["openai"])


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "parallm"
    root: str
    parent: str | None = None
    max_model_len: int = Field(description="prompt and completion together, in tokens")


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[Model]


def described(card: ModelCard) -> Model:
    """A model's card as OpenAI's object."""
    return Model(id=card.name, created=card.created, root=card.name, max_model_len=card.context_length)


@router.get("/v1/models", summary="List models")
@router.get("/models", include_in_schema=False)
async def list_models(ring: Annotated[Ring, Depends(ring_of)]) -> ModelList:
    """Models with at least one live worker."""
    cards = await ring.live_models()
    return ModelList(data=[described(cards[name]) for name in sorted(cards)])


@router.get("/v1/models/{name:path}", summary="Describe a model", responses=error_responses(404))
@router.get("/models/{name:path}", include_in_schema=False)
async def describe_model(name: str, ring: Annotated[Ring, Depends(ring_of)]) -> Model:
    """One model with a live worker."""
    card = (await ring.live_models()).get(name)
    if card is None:
        raise UnknownModelError(f"model '{name}' does not exist or has no live worker", param="model")
    return described(card)
