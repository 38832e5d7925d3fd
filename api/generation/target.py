"""The target of a request: a served model, or an adapter version on top of one.

`model` may be a served model (by its name, or by what its workers were given as `--model`), an adapter (`name`), a
version (`name@k`) or a weighted split (`a@1:0.9,b@2:0.1`); `adapter` and `lora_adapter` name adapters only. The base of
an adapter is the model with its manifest's `base_sha256`.

A name that is none of these may be an alias (`--model-alias`): what it stands for is looked up in its place.

Invariants. A split is decided here, by a hash of the session, so that a session stays with its choice; for an adapter
that is named alone, the split that is set for it (`api/ring/split_choices.py`) chooses the version. A pinned request
leaves with `name@k`, the version of its admission; a following one leaves with the bare name. Where the process
serves several rings, the target says which (`api/ring/choosing.py`), and whatever comes of the request is asked there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import Request
from pydantic import Field, model_validator

from api.callers.caller import asker
from api.http.fields import RequestModel, complaint
from api.ring.choosing import ring_for
from api.ring.ring import Ring, ServedModel
from api.ring.split_choices import SplitChoice
from shared.adapters import AdapterChoice, AdapterManifest, AdapterRef, ResolvedAdapter, check_language
from shared.errors import (
    ConflictError,
    InvalidRequestError,
    ServiceUnavailableError,
    UnknownAdapterError,
    UnknownModelError,
)
from shared.networks.spec import NetworkSpec
from shared.process.model_aliases import meant_by
from shared.redis.training.board import TrainingBoard
from shared.sequences import AdapterPolicy, ModelCard

BEGINNING = 4096  # characters or ids of a prompt, or of a user's first message, that distinguish conversations
FIRST = 4  # messages, of which one is the user's first


def first_words(messages: Sequence[Any]) -> str:
    """The user's first text in the messages of any protocol. It is the same in all later turns."""
    message = next((each for each in messages[:FIRST] if getattr(each, "role", "") == "user"), None)
    content = getattr(message, "content", None) or ""
    if isinstance(content, str):
        return content[:BEGINNING]
    return "".join(str(getattr(part, "text", ""))[:BEGINNING] for part in content[:FIRST])[:BEGINNING]


class TargetFields(RequestModel):
    """Fields that say which model and adapter a request wants."""

    model: str | None = Field(
        default=None,
        description="a served model, an adapter, a version of it (`name@k`), or a split (`a@1:0.9,b@2:0.1`); "
        "may be left out when only one model is served",
    )
    adapter: str | None = Field(default=None, description="an adapter, a version of it or a split, as in `model`")
    lora_adapter: str | None = Field(default=None, description="the same as `adapter`")
    adapter_policy: AdapterPolicy | None = Field(
        default=None, description="follow: newest version at each decode step; pin: the version at the start"
    )
    user: str | None = Field(default=None, description="a session: it stays with its choice of an adapter split")
    cache: bool | None = Field(
        default=None, description="false: no KV of it is stored for later requests, as with `X-Parallm-No-Cache: 1`"
    )

    @property
    def session(self) -> str:
        """Who stays with a choice of a split; "": every request is alone."""
        return self.user or ""

    @property
    def cache_key(self) -> str:
        """OpenAI's `prompt_cache_key`, of the requests that have one."""
        return getattr(self, "prompt_cache_key", None) or ""

    @property
    def opening(self) -> str:
        """Text that all turns of a conversation begin with: where rings share a model, such turns go to one of them;
        "": nothing."""
        return ""

    @model_validator(mode="after")
    def _one_adapter(self) -> "TargetFields":
        if self.adapter and self.lora_adapter and self.adapter != self.lora_adapter:
            raise complaint("adapter", "'adapter' and 'lora_adapter' name different adapters")
        return self


@dataclass(frozen=True)
class Target:
    """A served model and what a sequence says of its adapter."""

    ring: Ring
    served: ServedModel
    adapter: str = ""  # for SequenceSpec: "" is the base
    policy: AdapterPolicy = "pin"
    admitted: ResolvedAdapter | None = None  # the version at admission
    choice: SplitChoice | None = None  # where a split of the adapter has chosen it
    cache: bool = True  # False: the request's body asks that nothing of it be cached

    @property
    def network(self) -> NetworkSpec | None:
        """Layers of a version that is a network and no adapter of a language model; None for all others."""
        return None if self.admitted is None else self.admitted.manifest.network


@dataclass(frozen=True)
class JobTarget:
    """A known model, whether or not a worker lives, and what a job says of its adapter: a split stays one."""

    ring: Ring
    card: ModelCard
    adapter: str = ""


async def target_of(
    ring: Ring, body: TargetFields, request: Request, *, split: bool = False, networks: bool = False
) -> Target:
    """The target of one request, pinned unless it says otherwise; errors and the rest as in `find_target`."""
    session = body.session or request.state.request_id
    adapter = body.adapter or body.lora_adapter or ""
    policy = body.adapter_policy or "pin"
    begun = f"{body.session}\n{body.opening}" if ring.others and body.opening else ""  # one ring asks for none
    ring, model, adapter = await ring_for(ring, body.model, adapter, conversation=begun)
    target = await find_target(ring, model, adapter, policy, session=session, split=split, networks=networks)
    return replace(target, cache=body.cache is not False)


async def find_target(
    ring: Ring,
    model: str | None,
    adapter: str = "",
    policy: AdapterPolicy = "pin",
    *,
    session: str,
    split: bool = False,
    networks: bool = False,
) -> Target:
    """The target of one request; UnknownModelError, UnknownAdapterError, or InvalidRequestError for a wrong pair.

    `split`: where only an adapter is named, its split may choose the version. That is for answers that people or
    rewards judge; vectors and scores of two versions cannot be compared.

    `networks`: the version may be a network, which any model's workers compute, and which is always pinned.
    """
    ring, model, adapter = await ring_for(ring, model, adapter)
    model = await meant(ring, model)
    if not adapter and (model is None or await ring.live_card(model) is not None):
        return Target(ring, await ring.served(model))
    base, reference = await _parted(ring, model, adapter)
    if not reference:
        return Target(ring, await ring.served(base))
    parsed = await _parsed(ring, reference, adapter)
    by_split = None
    if split and policy == "pin" and parsed.choices[0].follows and len(parsed.choices) == 1:
        by_split = await _by_split(ring, parsed.choices[0].name, session)
    resolved, choice = by_split or (await _resolve(ring, parsed, session, as_model=not adapter), None)
    if not networks:
        check_language(resolved.manifest)
    served = await ring.served(base or await _live_base(ring, resolved.manifest))
    check_base(resolved.manifest, served.card)
    follow = resolved.follows and policy == "follow" and resolved.manifest.network is None
    name = resolved.name if follow else resolved.id
    return Target(ring, served, name, "follow" if follow else "pin", resolved, choice)


async def find_job_target(ring: Ring, model: str | None, adapter: str, policy: AdapterPolicy) -> JobTarget:
    """The target of a job; pinned, each name in it becomes its latest version."""
    ring, model, adapter = await ring_for(ring, model, adapter)
    model = await meant(ring, model)
    base, reference = await _parted(ring, model, adapter)
    if base:
        await ring.check_size(base)
    if not reference:
        return JobTarget(ring, (await ring.known(base))[0] if base else (await ring.served(None)).card)
    choices = (await _parsed(ring, reference, adapter)).choices
    found = [await _resolve(ring, AdapterRef((choice,)), "", as_model=not adapter) for choice in choices]
    for each in found:
        check_language(each.manifest)
    manifest = found[0].manifest
    card = (await ring.known(base))[0] if base else await card_of_base(ring, manifest.base_sha256)
    for each in found:
        check_base(each.manifest, card)
    if policy == "pin":
        choices = tuple(
            msgspec.structs.replace(choice, version=each.version) for choice, each in zip(choices, found, strict=True)
        )
    return JobTarget(ring, card, str(AdapterRef(choices)))


async def meant(ring: Ring, model: str | None) -> str | None:
    """The model or adapter that a request's `model` stands for: itself, unless it is only an alias."""
    alias = None if model is None else meant_by(model, ring.settings.model_alias)
    if model is None or alias is None or await ring.knows(model):
        return model
    if await _is_adapter(ring, model):
        return model
    return alias


async def _is_adapter(ring: Ring, model: str) -> bool:
    try:
        choices = AdapterRef.parse(model).choices
    except InvalidRequestError:
        return False
    owner = await ring.adapters.owner(choices[0].name)
    return owner is not None and asker().sees(owner)


async def card_of_base(ring: Ring, base_sha256: str) -> ModelCard:
    """The model with this base, one with a live worker first; without a hash, the only one that is served."""
    if not base_sha256:
        return (await ring.served(None)).card
    cards = [*(await ring.live_models()).values(), *await ring.registry.models()]
    for card in cards:
        if card.base_sha256 == base_sha256:
            return card
    for entry in ring.models.entries.values():
        if entry.sha256 == base_sha256 and (cold := await ring.card(entry.name)) is not None:
            return cold
    raise ConflictError(f"no model that was ever served here is the adapter's base ({base_sha256[:12]})")


def check_base(manifest: AdapterManifest, card: ModelCard) -> None:
    """InvalidRequestError when the version was made for another model."""
    if manifest.network is None and manifest.base_sha256 not in ("", card.base_sha256):
        raise InvalidRequestError(
            f"adapter {manifest.id} was made for another base model than '{card.name}'", param="adapter"
        )


async def _parted(ring: Ring, model: str | None, adapter: str) -> tuple[str | None, str]:
    """(model, adapter reference): `model` may be either."""
    if model is None or await ring.knows(model):
        return model, adapter
    if not adapter:
        return None, model
    if adapter != model:
        raise UnknownModelError(f"model '{model}' does not exist; with 'adapter', 'model' is its base", param="model")
    return None, adapter


async def _parsed(ring: Ring, reference: str, adapter: str) -> AdapterRef:
    try:
        return AdapterRef.parse(reference)
    except InvalidRequestError as error:
        if adapter or "@" in reference or ":auto" in reference:
            error.param = "adapter" if adapter else "model"
            raise
        raise await _unknown(ring, reference) from error


async def _unknown(ring: Ring, name: object) -> UnknownModelError:
    await ring.live_models()
    cold = [each.full_name(model) for each in ring.home.all for model in each.models.entries]
    served = ", ".join(sorted({*ring.home.all_models_seen, *cold})) or "none"
    return UnknownModelError(
        f"model '{name}' does not exist, nor an adapter of this name; served: {served}", param="model"
    )


async def _resolve(ring: Ring, ref: AdapterRef, session: str, *, as_model: bool) -> ResolvedAdapter:
    try:
        return await ring.adapters.resolve(ref, session)
    except UnknownAdapterError as error:
        if len(ref.choices) == 1 and ref.choices[0].follows:
            await check_published(ring, ref.choices[0].name)
        if as_model and not any(choice.version for choice in ref.choices):
            raise await _unknown(ring, ref) from error
        raise UnknownAdapterError(error.message, param="model" if as_model else "adapter") from error


async def _by_split(ring: Ring, name: str, session: str) -> tuple[ResolvedAdapter, SplitChoice] | None:
    choice = await ring.splits.choose(name, session)
    if choice is None:
        return None
    try:
        return await ring.adapters.resolve(AdapterRef((AdapterChoice(name, choice.arm.version),))), choice
    except (UnknownAdapterError, ConflictError):  # deleted or rejected since this process has looked
        ring.splits.forget(name)
        return None


async def check_published(ring: Ring, name: str) -> None:
    """503 for an adapter that is not there yet: its trainer is loading, or has not offered a first version so far."""
    board = TrainingBoard(ring.redis, name)
    owner = await board.alive()
    if not owner or await ring.adapters.latest(name):
        return
    status = await board.status()
    if status is None or status.owner != owner or not status.next_version_at:  # else it is an earlier trainer's word
        raise ServiceUnavailableError(
            f"the trainer of policy '{name}' is starting and has not published its first version yet: ask again in a "
            "few seconds (/v1/training/status has it as current_lora)",
            retry_after_s=2,
        )
    raise ServiceUnavailableError(
        f"policy '{name}' has no version yet: its trainer (mode {status.mode}) has made {status.train_step} of "
        f"{status.steps} train steps, and offers its first version after step {status.next_version_at}; ask the base "
        "model until then",
        retry_after_s=10,
    )


async def _live_base(ring: Ring, manifest: AdapterManifest) -> str | None:
    if not manifest.base_sha256:
        return None
    if manifest.network is not None:
        return min(await ring.live_models(), default=None)  # one model for all: its workers gather rows
    for card in (await ring.live_models()).values():
        if card.base_sha256 == manifest.base_sha256:
            return card.name
    for entry in ring.models.entries.values():
        if entry.sha256 == manifest.base_sha256:
            return entry.name
    raise ServiceUnavailableError(f"no live worker serves the base model of adapter {manifest.id} at the moment")
