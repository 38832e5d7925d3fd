"""GET /v1/models: models that a live worker serves, the adapters of them, and models of the catalogue with the state of
each; for Anthropic's clients as theirs."""

from collections.abc import Collection
from typing import Any, Literal

from fastapi import APIRouter, Request
from msgspec import structs
from pydantic import BaseModel, Field

from api.callers.caller import asker
from api.generation.target import meant
from api.http.anthropic_errors import speaks_anthropic
from api.http.errors import error_responses
from api.http.fields import rfc3339
from api.openai.codex_models import codex_model
from api.ring.choosing import from_each, ring_for
from api.ring.cold_models import ModelState, obstacle, progress_of, state_of
from api.ring.ring import Ring, TheRing
from shared.adapters import AdapterManifest, AdapterRef
from shared.catalogue import CatalogueEntry, RingModels
from shared.errors import InvalidRequestError, UnknownAdapterError, UnknownModelError
from shared.process.model_aliases import plain_names
from shared.sequences import ModelCard

router = APIRouter(tags=["openai"])


class ModelPlace(BaseModel):
    """A host that holds a model of the catalogue, or loads it."""

    host: str = Field(description="name of the machine")
    id: str = Field(description="of the host, as `POST /v1/models/load` takes it")
    state: str = Field(description="downloading, loading, ready, unloading or failed")
    progress: float = Field(description="of a download or a load, from 0 to 1")
    since_ms: int = Field(description="Unix time at which the state began")
    need_bytes: int = Field(description="memory that it takes there")
    load_s: float = Field(description="measured duration of its load; 0: not measured")
    why: str = Field(description="it has failed; empty otherwise")


class CatalogueFacts(BaseModel):
    """Facts of the catalogue about a model."""

    source: str = Field(description="as a worker's --model takes it")
    aliases: list[str]
    size_bytes: int = Field(description="of the weights in memory; 0: no host has looked at them")
    family: str
    pinned: bool
    priority: int
    idle_s: float = Field(description="after so long without a request it is unloaded; 0: the host's default")
    ranks: int
    options: dict[str, str]
    hosts: list[ModelPlace] = Field(description="that hold it, or load it")
    offered_by: list[str] = Field(description="machines that can load it")
    why: str = Field(description="no host can load it; empty: one can, or does")


class Model(BaseModel):
    """A model that is served or can be, or an adapter of one."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "parallm"
    root: str
    parent: str | None = Field(default=None, description="of an adapter: its base model")
    max_model_len: int = Field(description="prompt and completion together, in tokens")
    context_length: int = Field(description="the same, or less where no worker's KV memory holds so much")
    version: int | None = Field(default=None, description="of an adapter: its latest version")
    state: ModelState = Field(
        default="ready",
        description="ready: a worker serves it; downloading, loading, unloading; loadable: a host loads it on request; "
        "failed, unavailable: a request gets 503",
    )
    progress: float = Field(default=1.0, description="of a download or a load, from 0 to 1")
    catalogue: CatalogueFacts | None = Field(
        default=None, description="of a model of the catalogue, for a key that is not a tenant's"
    )
    sees: bool = Field(default=False, exclude=True)


class ModelList(BaseModel):
    """Models and adapters that a request may name."""

    object: Literal["list"] = "list"
    data: list[Model]


class CodexModelList(ModelList):
    """The same for Codex, which says so by `client_version`."""

    models: list[dict[str, Any]]


class AnthropicModel(BaseModel):
    """The same to a client of Anthropic's, which says so by its header `anthropic-version`."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str = Field(description="when it was first served")
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int = Field(description="prompt and completion together")
    max_tokens: int

    @classmethod
    def of(cls, model: Model) -> "AnthropicModel":
        """A model as Anthropic shows it."""
        created = rfc3339(model.created)
        most = model.context_length
        return cls(id=model.id, display_name=model.root, created_at=created, max_input_tokens=most, max_tokens=most)


class AnthropicModelList(BaseModel):
    """All served models, on one page."""

    data: list[AnthropicModel]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


@router.get("/v1/models", summary="List models")
@router.get("/models", include_in_schema=False)
async def list_models(
    request: Request, ring: TheRing, client_version: str = ""
) -> CodexModelList | ModelList | AnthropicModelList:
    """Models with at least one live worker, the adapters that such a worker can serve, models of the catalogue in any
    state, and aliases of all."""
    models = await served_models(ring)
    if client_version:
        shown_to_codex = [codex_model(model.id, model.context_length, sees=model.sees) for model in models]
        return CodexModelList(data=models, models=shown_to_codex)
    if not speaks_anthropic(request.scope):
        return ModelList(data=models)
    shown = [AnthropicModel.of(model) for model in models]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return AnthropicModelList(data=shown, first_id=first, last_id=last)


@router.get("/v1/models/{name:path}", summary="Describe a model", responses=error_responses(404))
@router.get("/models/{name:path}", include_in_schema=False)
async def describe_model(name: str, request: Request, ring: TheRing) -> Model | AnthropicModel:
    """One model with a live worker or of the catalogue, an adapter (`name` or `name@k`) of one, or what an alias stands
    for."""
    chosen = await ring_for(ring, name)
    known = await meant(chosen.ring, chosen.model) or name
    model = await _found(chosen.ring, known)
    if model is None:
        raise UnknownModelError(f"model '{name}' does not exist or has no live worker", param="model")
    if known != name:
        model = model.model_copy(update={"id": name})
    return AnthropicModel.of(model) if speaks_anthropic(request.scope) else model


async def served_models(ring: Ring) -> list[Model]:
    """The models, adapters and aliases of all rings that answer; `RING/NAME` where an earlier one has a model of this
    name."""
    models: list[Model] = []
    for each, found in await from_each(ring, _models):
        taken = {model.id for model in models}
        models += [_in_ring(each, model, taken) for model in found]
    return models + await _aliases(ring, models)


async def _models(ring: Ring) -> list[Model]:
    """A ring's models and adapters."""
    cards = await ring.live_models()
    models = [_described(ring, cards[name]) for name in sorted(cards)]
    for entry in ring.models.entries.values():
        model = await described(ring, entry)
        names = [name for name in entry.names if name not in cards]
        models += [model.model_copy(update={"id": name}) for name in names]
    for name, latest in sorted((await ring.adapters.pointers()).items()):
        if latest and (adapter := await _adapter(ring, name)) is not None:
            models.append(adapter)
    return models


def _in_ring(ring: Ring, model: Model, taken: Collection[str]) -> Model:
    """A model of another ring by a name that reaches it."""
    return model.model_copy(update={"id": ring.full_name(model.id)}) if model.id in taken else model


async def _aliases(ring: Ring, models: list[Model]) -> list[Model]:
    """Those that are names, not globs, and stand for something that is served or can be."""
    taken, shown = {model.id for model in models}, []
    for name, target in plain_names(ring.settings.model_alias).items():
        if name in taken:
            continue
        chosen = await ring_for(ring, target)
        if (found := await _found(chosen.ring, chosen.model or "")) is not None:
            shown.append(found.model_copy(update={"id": name}))
    return shown


async def _found(ring: Ring, name: str) -> Model | None:
    """A model with a live worker or of the catalogue, or an adapter of one."""
    card = await ring.live_card(name)
    if (entry := ring.models.named(name)) is not None:
        return (await described(ring, entry)).model_copy(update={"id": name})
    return await _adapter(ring, name) if card is None else _described(ring, card)


async def _adapter(ring: Ring, reference: str) -> Model | None:
    """An adapter whose base has a live worker."""
    try:
        (choice,) = AdapterRef.parse(reference).choices
        manifest = await ring.adapters.manifest(choice.name, choice.version)
    except (InvalidRequestError, UnknownAdapterError, ValueError):
        return None
    for card in (await ring.live_models()).values():
        if manifest.base_sha256 in ("", card.base_sha256):
            return _described_adapter(ring, reference, manifest, card)
    return None


async def described(ring: Ring, entry: CatalogueEntry) -> Model:
    """A model of the catalogue."""
    if (live := await ring.live_card(entry.name)) is not None:
        return _described(ring, live)
    card = await ring.registry.card(entry.name)
    context = entry.context or (0 if card is None else card.context_length)
    return Model(
        id=entry.name,
        created=entry.added_ms // 1000,
        root=entry.name,
        max_model_len=context,
        context_length=context,
        state=state_of(ring.models, entry),
        progress=progress_of(ring.models, entry.name),
        catalogue=_facts(ring.models, entry),
        sees=card is not None and card.vision is not None,
    )


def _facts(models: RingModels, entry: CatalogueEntry) -> CatalogueFacts | None:
    """For whom folders and machines are no secret."""
    if asker().limited:
        return None
    why_not = obstacle(models, entry)
    places = [
        ModelPlace(host=host.host, id=host.id, **{name: getattr(held, name) for name in _OF_A_PLACE})
        for host, held in models.holding(entry.name)
    ]
    return CatalogueFacts(
        **{name: value for name, value in structs.asdict(entry).items() if name in CatalogueFacts.model_fields},
        hosts=places,
        offered_by=sorted({host.host for host in models.hosts if entry.name in host.offers}),
        why="" if why_not is None else why_not.reason,
    )


_OF_A_PLACE = ("state", "progress", "since_ms", "need_bytes", "load_s", "why")


def _described(ring: Ring, card: ModelCard) -> Model:
    entry = ring.models.entries.get(card.name)
    return Model(
        id=card.name,
        created=card.created,
        root=card.name,
        max_model_len=card.context_length,
        context_length=ring.longest(card),
        sees=card.vision is not None,
        catalogue=None if entry is None else _facts(ring.models, entry),
    )


def _described_adapter(ring: Ring, reference: str, manifest: AdapterManifest, card: ModelCard) -> Model:
    return Model(
        id=reference,
        created=manifest.created_ms // 1000,
        root=manifest.id,
        parent=card.name,
        max_model_len=card.context_length,
        context_length=ring.longest(card),
        version=manifest.version,
        sees=card.vision is not None,
    )
