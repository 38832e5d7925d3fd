"""Learners and what is asked of them. Each route places a request and answers with the id of its future.

The SDK numbers a learner's requests from 1; here number 1 is what makes the learner, so theirs are one higher. The same
number again is the same request, so whatever the SDK sends again changes nothing.
"""

import secrets
import time
from typing import Any, cast, get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.callers.caller import asker
from api.callers.fair_pool import aside
from api.generation.named_images import Known
from api.generation.target import meant
from api.http.errors import error_responses, json_reply
from api.http.limits import is_protobuf, most_numbers
from api.ring.ring import Ring, TheRing
from api.tinker import passes
from api.tinker.bodies import (
    ExternalBody,
    GivenDatum,
    LoadBody,
    LoraBody,
    Metadata,
    ModelBody,
    ModelId,
    PublishBody,
    SaveBody,
    StepBody,
    tokens_of,
)
from api.tinker.names import INFLIGHT, SavePath, adapter_of, keeper, learner_of, session_named, spec_named
from api.tinker.numbered import NumberedRoute
from api.tinker.passes import Form, number_decoder
from api.tinker.prompts import ImageChunk, seen_prompt
from shared import learners
from shared.adapters import LoraKind
from shared.errors import (
    ConflictError,
    InvalidRequestError,
    ServiceUnavailableError,
    UnsupportedModelError,
    UnsupportedParameterError,
)
from shared.learners import (
    BeginRequest,
    Datum,
    ImagePassRequest,
    LearnerSpec,
    LoadRequest,
    PassRequest,
    PublishRequest,
    SaveRequest,
    checked,
)
from shared.redis import keys
from shared.redis.training.learner_store import MOST_BYTES
from shared.sequences import ModelCard

router = APIRouter(tags=["tinker"], prefix="/api/v1", route_class=NumberedRoute)
ERRORS = error_responses(400, 404, 409, 429, 503)
ALPHA = 32.0  # of LoRA, whatever the rank, as in Tinker
MOST_IMAGES = 1024  # of a pass
MOST_PIXELS = 1 << 26  # of a pass's images as the model sees them: a service holds their tiles, 3 bytes each
MOST_FILE_BYTES = MOST_BYTES // 2  # of a pass's images
_KIND = "lora_kind"  # in a learner's metadata
_KIND_PARAM = f"user_metadata.{_KIND}"


@router.post("/create_model", summary="Make a learner", response_class=Response, responses=ERRORS)
async def create_model(body: ModelBody, ring: TheRing) -> Response:
    """A LoRA, or the DoRA that its metadata ask for, over a model that a training service lives for."""
    _check_optimizer(body.optimizer_config)
    learner = learner_of((await session_named(ring, body.session_id)).id, body.model_seq_id)
    card = await _trainable(ring, body.base_model)
    lora = body.lora_config or LoraBody(rank=32)
    await _make(ring, learner, card, lora, _kind(body.user_metadata) or "lora", body.user_metadata)
    return await _placed(ring, learner, 0, BeginRequest())


@router.post("/forward_backward", summary="Gradients", response_class=Response, responses=ERRORS)
async def forward_backward(request: Request, ring: TheRing) -> Response:
    """A pass as protobuf (with `forward_only`, one without gradients) or as JSON."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedParameterError("a compressed body is not taken: the client's configuration asks for none")
    return await _pass(ring, request, Form(is_protobuf(request.headers)))


@router.post("/forward", summary="Log-probabilities", response_class=Response, responses=ERRORS)
async def forward(request: Request, ring: TheRing) -> Response:
    """A pass without gradients, as JSON."""
    return await _pass(ring, request, Form(backward=False))


@router.post("/optim_step", summary="One update", response_class=Response, responses=ERRORS)
async def optim_step(body: StepBody, ring: TheRing) -> Response:
    """AdamW with the gradients of the passes since the last one."""
    spec = await spec_named(ring, body.model_id)
    return await _placed(ring, spec.id, body.seq_id, body.request())


@router.post("/save_weights", summary="Keep a state", response_class=Response, responses=ERRORS)
async def save_weights(body: SaveBody, ring: TheRing) -> Response:
    """Weights and moments under a name."""
    spec = await spec_named(ring, body.model_id)
    name = body.path or f"{body.seq_id:06d}"
    saves = [] if body.overwrite else await ring.learners.saves(spec.id)
    taken = any(save.kind == "state" and save.name == name for save in saves)
    if taken and not await ring.learners.knows(spec.id, body.seq_id + 1):  # else it is its own, sent again
        raise ConflictError(f"there is a save {name!r} already ('overwrite')", param="path")
    save = SaveRequest(name, body.ttl_seconds or 0, body.user_metadata or {})
    return await _placed(ring, spec.id, body.seq_id, save)


@router.post("/save_weights_for_sampler", summary="Serve the weights", response_class=Response, responses=ERRORS)
async def save_weights_for_sampler(body: PublishBody, ring: TheRing) -> Response:
    """The weights become an adapter version; its sampler is there when the future is. One that is `inflight` draws each
    sample from the version that is the latest when the sample begins.
    """
    if body.kind == "inflight" and (body.path is not None or body.ttl_seconds is not None):
        raise InvalidRequestError("'inflight' weights have no 'path' and no 'ttl_seconds': they change", param="kind")
    spec = await spec_named(ring, body.model_id)
    name = body.path or f"unnamed-{body.seq_id:06d}"
    lives_s = (body.ttl_seconds or keys.LEARNER_SAVE_TTL_S) if body.path else 0
    publish = PublishRequest(name, lives_s, body.user_metadata or {})
    more = "" if body.sampling_session_seq_id is None else f":{body.sampling_session_seq_id}"
    more += INFLIGHT if more and body.kind == "inflight" else ""
    return await _placed(ring, spec.id, body.seq_id, publish, more)


@router.post(
    "/save_weights_external", summary="Keep weights to be taken away", response_class=Response, responses=ERRORS
)
async def save_weights_external(body: ExternalBody, ring: TheRing) -> Response:
    """Weights alone under a name; their files have addresses (api/tinker/downloads.py)."""
    spec = await spec_named(ring, body.model_id)
    return await _placed(ring, spec.id, body.seq_id, SaveRequest(body.path, body.ttl_seconds or 0, kind="external"))


@router.post("/load_weights", summary="Go on from a save", response_class=Response, responses=ERRORS)
async def load_weights(body: LoadBody, ring: TheRing) -> Response:
    """A save of the asker's, into a learner that is there, or into a new one of the save's shape."""
    path = SavePath.parse(body.path)
    source = await spec_named(ring, path.learner)
    if path.kind != "state":
        raise InvalidRequestError("only a save of the state can be loaded, not one for sampling", param="path")
    await ring.learners.save_named(source.id, "state", path.name)
    load = LoadRequest(source.id, path.name, body.optimizer)
    if body.model_id is not None and body.seq_id is not None:
        spec = await spec_named(ring, body.model_id)
        return await _placed(ring, spec.id, body.seq_id, load)
    if body.session_id is None or body.model_seq_id is None:
        raise InvalidRequestError("'session_id' and 'model_seq_id', or 'model_id' and 'seq_id'", param="model_id")
    _check_optimizer(body.optimizer_config)
    card = await _trainable(ring, body.base_model or source.model)
    if card.name != source.model:
        raise InvalidRequestError(f"the save is of '{source.model}'", param="base_model")
    learner = learner_of((await session_named(ring, body.session_id)).id, body.model_seq_id)
    lora = LoraBody(rank=source.rank, seed=source.seed, train_mlp=source.mlp, train_attn=source.attention)
    if (kind := _kind(body.user_metadata)) not in (None, source.kind):
        raise InvalidRequestError(f"the save is of kind {source.kind!r}, not {kind!r}", param=_KIND_PARAM)
    await _make(ring, learner, card, lora, source.kind, body.user_metadata)
    return await _placed(ring, learner, 0, load)


@router.post("/get_info", summary="A learner", response_class=Response, responses=ERRORS)
async def get_info(body: ModelId, ring: TheRing) -> Response:
    """Returns the learner's model and rank."""
    spec = await spec_named(ring, body.model_id)
    card, _ = await ring.known(spec.model)
    tokenizer = card.sources[0] if card.sources else card.name
    return json_reply(
        {
            "type": "get_info",
            "model_id": spec.id,
            "model_name": spec.model,
            "model_data": {"arch": "", "model_name": spec.model, "tokenizer_id": tokenizer},
            "is_lora": True,
            "lora_rank": spec.rank,
        }
    )


@router.post("/unload_model", summary="Nothing", response_class=Response, responses=ERRORS)
async def unload_model(body: ModelId, ring: TheRing) -> Response:
    """Learners leave memory by themselves; the answer is that of the request that made it."""
    spec = await spec_named(ring, body.model_id)
    return json_reply({"request_id": f"{spec.id}:0", "model_id": spec.id})


async def _pass(ring: Ring, request: Request, form: Form) -> Response:
    async with ring.bodies.reading(await request.body()) as reading:
        form.most_values, form.most_objects = most_numbers(ring.settings)
        named = number_decoder.decode(await reading.call(passes.number, form))
        spec = await spec_named(ring, named.model_id)
        card, codec = await ring.known(spec.model)
        asked = await aside(passes.pass_decoder.decode, await reading.call(passes.given, form))
    data, files = [each.text for each in asked.data], dict[bytes, bytes]()
    if any(datum is None for datum in data):
        if await ring.learners.knows(spec.id, asked.seq_id + 1):  # whatever has become of its images' URLs
            await ring.learners.wake(spec)
            return _reply(spec.id, asked.seq_id)
        await _check_seen(ring, spec, card, asked.data)
        size, pixels, known = 0, 0, Known()

        async def keep(sha256: bytes, file: bytes) -> None:
            nonlocal size
            if sha256 not in files:
                size += len(file)
            if size > MOST_FILE_BYTES:
                raise _too_many(f"{MOST_FILE_BYTES >> 20} MiB of files", "data")
            files[sha256] = file

        for at, datum in enumerate(asked.data):
            if data[at] is None:
                where = f"data[{at}].model_input"
                prompt = await seen_prompt(ring, card, codec, datum.prompt(), where, keep, known)
                data[at] = Datum(await aside(tokens_of, prompt.ids), datum.inputs, prompt.images)
                pixels += prompt.pixels
                if pixels > MOST_PIXELS:
                    raise _too_many(f"{MOST_PIXELS} pixels, as the model sees them", where)
    whole = tuple(datum for datum in data if datum is not None)
    placed = (ImagePassRequest if files else PassRequest)(whole, asked.loss, asked.constants, asked.backward, files)
    await aside(checked, placed, card.vocab_size, card.context_length)
    return await _placed(ring, spec.id, asked.seq_id, placed)


async def _check_seen(ring: Ring, spec: LearnerSpec, card: ModelCard, data: list[GivenDatum]) -> None:
    """Before images are read; UnsupportedModelError when the model cannot learn from them."""
    if card.vision is not None:  # else the images themselves are refused
        service = await ring.learners.service(spec.model)
        if service is None:
            raise _no_service(spec.model)
        if not service.sees:
            message = f"the training service of '{spec.model}' does not learn from images"
            raise UnsupportedModelError(message, param="data")
    if await aside(_count_images, data) > MOST_IMAGES:
        raise _too_many(str(MOST_IMAGES), "data")


def _count_images(data: list[GivenDatum]) -> int:
    return sum(isinstance(piece, ImageChunk) for datum in data for piece in datum.pieces)


def _too_many(most: str, where: str) -> InvalidRequestError:
    return InvalidRequestError(f"the images of a pass are at most {most}: send fewer data at a time", param=where)


async def _placed(ring: Ring, learner: str, number: int, request: learners.Request, more: str = "") -> Response:
    await ring.learners.place(await ring.learners.spec(learner), number + 1, request)
    return _reply(learner, number, more)


def _reply(learner: str, number: int, more: str = "") -> Response:
    answer: dict[str, Any] = {"request_id": f"{learner}:{number}{more}", "model_id": learner}
    return json_reply(answer)


def _kind(metadata: Metadata) -> LoraKind | None:
    """Kind of LoRA that a client asks for in its metadata, the only place that the SDK has for it; None: nothing."""
    asked = (metadata or {}).get(_KIND)
    if asked is not None and asked not in get_args(LoraKind):
        raise InvalidRequestError(f"{asked!r} is none of {', '.join(get_args(LoraKind))}", param=_KIND_PARAM)
    return cast("LoraKind | None", asked)


async def _make(ring: Ring, learner: str, card: ModelCard, lora: LoraBody, kind: LoraKind, metadata: Metadata) -> None:
    service = await ring.learners.service(card.name)
    if service is not None and lora.rank > service.max_rank:
        raise InvalidRequestError(f"rank {lora.rank} is above the service's {service.max_rank}", param="lora_config")
    if not (lora.train_attn or lora.train_mlp):
        raise UnsupportedParameterError("the output layer alone cannot be trained", param="lora_config.train_unembed")
    spec = LearnerSpec(
        id=learner,
        model=card.name,
        rank=lora.rank,
        scale=ALPHA / lora.rank,
        kind=kind,
        seed=secrets.randbits(31) if lora.seed is None else lora.seed,
        attention=lora.train_attn,
        mlp=lora.train_mlp,
        owner=asker().publishes_for,
        keeper=keeper(),
        adapter=adapter_of(learner),
        created_ms=time.time_ns() // 1_000_000,
        metadata={str(key): str(value) for key, value in (metadata or {}).items()},
    )
    await ring.learners.create(spec)
    await ring.tinker.note_run(spec.keeper, learner)


async def _trainable(ring: Ring, name: str) -> ModelCard:
    """UnknownModelError, or ServiceUnavailableError when no service trains learners of this model."""
    card = (await ring.served(await meant(ring, name))).card
    if await ring.learners.service(card.name) is None:
        raise _no_service(card.name, name)
    return card


def _no_service(model: str, called: str = "") -> ServiceUnavailableError:
    start = f"start one with mlx_parallm_learners --model {called or model}"
    return ServiceUnavailableError(f"no training service of '{model}' is alive: {start}", retry_after_s=5)


def _check_optimizer(config: dict[str, Any] | None) -> None:
    if config is not None and config.get("type", "adamw") != "adamw":
        raise UnsupportedParameterError("the only optimizer is adamw", param="optimizer_config")
