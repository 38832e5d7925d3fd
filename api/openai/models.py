"""GET /v1/models: the models that a live worker serves, and the adapters of them."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.http.errors import error_responses
from api.ring.ring import Ring, TheRing
from shared.adapters import AdapterManifest, AdapterRef
from shared.errors import InvalidRequestError, UnknownAdapterError, UnknownModelError
from shared.sequences import ModelCard

router = APIRouter(tags=["openai"])


class Model(BaseModel):
    """A served model, or an adapter of one."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "parallm"
    root: str
    parent: str | None = Field(default=None, description="of an adapter: its base model")
    max_model_len: int = Field(description="prompt and completion together, in tokens")
    version: int | None = Field(default=None, description="of an adapter: its latest version")


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models", summary="List models")
@router.get("/models", include_in_schema=False)
async def list_models(ring: TheRing) -> ModelList:
    """Models with at least one live worker, and the adapters that such a worker can serve."""
    cards = await ring.live_models()
    models = [_described(cards[name]) for name in sorted(cards)]
    for name, latest in sorted((await ring.adapters.pointers()).items()):
        if latest and (adapter := await _adapter(ring, name)) is not None:
            models.append(adapter)
    return ModelList(data=models)


@router.get("/v1/models/{name:path}", summary="Describe a model", responses=error_responses(404))
@router.get("/models/{name:path}", include_in_schema=False)
async def describe_model(name: str, ring: TheRing) -> Model:
    """One model with a live worker, or an adapter (`name` or `name@k`) of one."""
    card = await ring.live_card(name)
    model = _described(card) if card is not None else await _adapter(ring, name)
    if model is None:
        raise UnknownModelError(f"model '{name}' does not exist or has no live worker", param="model")
    return model


async def _adapter(ring: Ring, reference: str) -> Model | None:
    """An adapter whose base has a live worker."""
    try:
        (choice,) = AdapterRef.parse(reference).choices
        manifest = await ring.adapters.manifest(choice.name, choice.version)
    except (InvalidRequestError, UnknownAdapterError, ValueError):
        return None
    for card in (await ring.live_models()).values():
        if manifest.base_sha256 in ("", card.base_sha256):
            return _described_adapter(reference, manifest, card)
    return None


def _described(card: ModelCard) -> Model:
    return Model(id=card.name, created=card.created, root=card.name, max_model_len=card.context_length)


def _described_adapter(reference: str, manifest: AdapterManifest, card: ModelCard) -> Model:
    return Model(
        id=reference,
        created=manifest.created_ms // 1000,
        root=manifest.id,
        parent=card.name,
        max_model_len=card.context_length,
        version=manifest.version,
    )
