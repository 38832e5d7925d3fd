"""Samplers and samples. A sample is work of the ordinary queue, begun here and read by its future.

The process that began it works on it: it notes itself with the future, and when it dies, the future is gone
(410), upon which the SDK asks anew. The same number again is the same sample.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Path
from pydantic import ValidationError
from redis.exceptions import RedisError
from starlette.responses import Response

from api.callers.caller import client
from api.callers.fair_pool import aside
from api.generation.plan import PreparedRequest, plan
from api.generation.running import gather_all, owner
from api.generation.sampling import MAX_N, SamplingFields
from api.generation.sequences import Sequences
from api.generation.target import Target, find_target
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, from_validation, json_reply
from api.ring.ring import Ring, TheRing
from api.tinker.bodies import SampleBody, SamplerBody
from api.tinker.names import ID, SavePath, keeper, sampler_of, session_named, spec_named
from api.tinker.prompt_token_query import PromptTokenQuery
from api.tinker.prompts import seen_prompt, text_of
from api.tinker.protobuf import PromptSaid, Sampled, Top, sample_bytes
from shared.adapters import version_id
from shared.errors import (
    InvalidRequestError,
    NotFoundError,
    ParallmError,
    UnsupportedModelError,
    UnsupportedParameterError,
)
from shared.frames import TokenEvent, TokenLogprobs
from shared.images.refs import ImageRef
from shared.redis.queue.named_requests import NamedRequests
from shared.redis.training.tinker_store import TinkerSample, TinkerSampler
from shared.token_events import join

log = structlog.get_logger()

router = APIRouter(tags=["tinker"], prefix="/api/v1", route_class=BodyRoute)
ERRORS = error_responses(400, 404, 429, 503)
_running: dict[str, "asyncio.Task[None]"] = {}  # samples that this process works on, by keeper and id


@router.post("/create_sampling_session", summary="Make a sampler", response_class=Response, responses=ERRORS)
async def create_sampling_session(body: SamplerBody, ring: TheRing) -> Response:
    """Creates a sampler of a model, or of a version that a learner of the caller has published."""
    session = await session_named(ring, body.session_id)
    sampler = await _sampler(ring, sampler_of(session.id, body.sampling_session_seq_id), body)
    await ring.tinker.put(keeper(), sampler.id, sampler)
    return json_reply({"type": "create_sampling_session", "sampling_session_id": sampler.id})


@router.get("/samplers/{sampler_id}", summary="A sampler", response_class=Response, responses=ERRORS)
async def get_sampler(sampler_id: Annotated[str, Path(pattern=ID)], ring: TheRing) -> Response:
    """Returns the model or the version that the sampler draws from."""
    sampler = await _known(ring, sampler_id)
    named = {"base_model": sampler.base_model, "model_path": sampler.model_path or None}
    return json_reply({"sampler_id": sampler.id, **named})


@router.post("/asample", summary="Begin a sample", response_class=Response, responses=ERRORS)
async def asample(body: SampleBody, ring: TheRing) -> Response:
    """Returns the sample's future and the ids of its completions. A sample that cannot be drawn is refused here."""
    if body.sampling_session_id is None or body.seq_id is None:
        raise InvalidRequestError("a sample has a 'sampling_session_id' and a 'seq_id'", param="sampling_session_id")
    sampler = await _known(ring, body.sampling_session_id)
    id = f"{sampler.id}:sample:{body.seq_id}"
    sequences = [f"{id}:{number}" for number in range(body.num_samples)]
    answer: dict[str, Any] = {"request_id": id, "sample_sequence_ids": sequences}
    who = keeper()
    shows = any(chunk.type != "encoded_text" for chunk in body.prompt.chunks)
    if shows and await ring.tinker.find(who, TinkerSample, id) is not None:
        return json_reply(answer)  # whatever has become of its images' URLs
    planned, tokens = await _planned(ring, sampler, body, id)
    if await ring.tinker.put(who, id, TinkerSample(ring.api_id), new=True):
        token = client.set(None)  # the sample does not end with this request
        try:
            task = asyncio.create_task(_draw(ring, who, id, planned, body, tokens))
        finally:
            client.reset(token)
        name = f"{who}/{id}"
        _running[name] = task
        task.add_done_callback(lambda _: _running.pop(name, None))
    return json_reply(answer)


async def cancel_sample(ring: Ring, id: str) -> None:
    """End a sample that its client has cancelled, whichever process works on it."""
    who = keeper()
    if task := _running.get(f"{who}/{id}"):
        task.cancel()
    elif await ring.tinker.find(who, TinkerSample, id) is not None:
        for model, request in await NamedRequests(ring.redis).find(owner(), id):
            await ring.queue(model).cancel([f"{request}-{number}" for number in range(MAX_N)])
    await ring.tinker.forget(who, TinkerSample, id)


async def _known(ring: Ring, id: str) -> TinkerSampler:
    found = await ring.tinker.find(keeper(), TinkerSampler, id)
    if found is None:
        raise NotFoundError("there is no such sampler", param="sampling_session_id")
    return found


async def _sampler(ring: Ring, id: str, body: SamplerBody) -> TinkerSampler:
    if body.model_path is None:
        target = _own(ring, await find_target(ring, body.base_model, session=""))
        if target.adapter:
            return TinkerSampler(id, target.served.card.name, target.adapter)
        return TinkerSampler(id, target.served.card.name)
    path = SavePath.parse(body.model_path, "model_path")
    spec = await spec_named(ring, path.learner)
    if path.kind != "sampler":
        raise InvalidRequestError(
            "a save of the state is not for sampling (save_weights_for_sampler)", param="model_path"
        )
    info = await ring.learners.save_named(spec.id, "sampler", path.name)
    return TinkerSampler(id, spec.model, version_id(spec.adapter, info.version), body.model_path)


def _own(ring: Ring, target: Target) -> Target:
    if target.ring is not ring:
        raise UnsupportedModelError(
            f"Tinker's endpoints serve the models of ring '{ring.name}'; this one is in ring '{target.ring.name}'",
            param="base_model",
        )
    return target


async def _planned(ring: Ring, sampler: TinkerSampler, body: SampleBody, id: str) -> tuple[Sequences, PromptTokenQuery]:
    params = body.sampling_params
    stops = params.stop
    fields: dict[str, Any] = {
        "n": body.num_samples,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "seed": params.seed,
        "request_id": id,
        "collect_trajectory": False,
        "logprobs_mode": "raw_logprobs",
    }
    if stops == []:
        fields["ignore_eos"] = True
    elif isinstance(stops, list) and isinstance(stops[0], int):
        fields["stop_token_ids"] = stops
    elif stops is not None:
        fields["stop"] = stops
    if body.prompt_logprobs or body.topk_prompt_logprobs:
        fields["prompt_logprobs"] = body.topk_prompt_logprobs
    target = _own(ring, await find_target(ring, sampler.base_model, sampler.adapter, session=""))
    card = target.served.card
    pieces = await aside(body.prompt.pieces)
    ids, images = text_of(pieces), tuple[ImageRef, ...]()
    if ids is None:
        for name in ("prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(body, name):
                raise UnsupportedParameterError("it does not go with images", param=name)
        ids, images, _ = await seen_prompt(ring, card, target.served.codec, pieces, "prompt")
    tokens = await aside(PromptTokenQuery.of, body, len(ids), card.vocab_size)
    prepared = PreparedRequest(
        prompts=[list(ids)],
        max_tokens=params.max_tokens,
        default_tokens=card.context_length,
        clamp=params.max_tokens is None,
        logprobs=body.topk_sample_logprobs or None,
        images=images,
    )
    planned = await plan(ring, await aside(_fields, fields), target, prepared)
    return await aside(tokens.put_into, planned.sequences, body), tokens


def _fields(given: dict[str, Any]) -> SamplingFields:
    try:
        return SamplingFields.model_validate(given)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


async def _draw(
    ring: Ring, who: str, id: str, sequences: Sequences, body: SampleBody, tokens: PromptTokenQuery
) -> None:
    """Sample, and keep the result or why there is none."""
    try:
        gathered = await gather_all(ring, sequences)
        result = TinkerSample(ring.api_id, "done", await aside(_result, gathered, body, tokens))
    except asyncio.CancelledError:
        return
    except ParallmError as error:
        fault: Literal["user", "server"] = "server" if error.status >= 500 or error.status == 429 else "user"
        result = TinkerSample(ring.api_id, "failed", error=error.message, fault=fault)
    except Exception:
        log.exception("tinker.sample_failed", sample=id)
        result = TinkerSample(ring.api_id, "failed", error="the sample failed", fault="server")
    with contextlib.suppress(RedisError, OSError):
        await ring.tinker.put(who, id, result)


def _result(gathered: Sequence[list[TokenEvent]], body: SampleBody, tokens: PromptTokenQuery) -> bytes:
    wholes = [join(events) for events in gathered]
    sequences = [
        Sampled(
            list(whole.tokens),
            list(whole.logprobs),
            whole.finish is None or whole.finish.reason != "length",
            _top(whole.top_logprobs),
        )
        for whole in wholes
    ]
    first, top_k = wholes[0], body.topk_prompt_logprobs
    reported = first.prompt_others or [() for _ in first.prompt_logprobs or ()]
    targets = None if tokens.targets is None else (tokens.targets, tokens.logprobs(reported))
    prompt = PromptSaid(
        first.prompt_logprobs if body.prompt_logprobs else None,
        _top(first.prompt_top_logprobs) if top_k else (),
        top_k,
        targets,
        _top(tokens.drawn(reported)) if tokens.draws else (),
        tokens.draws,
    )
    return sample_bytes(sequences, body.topk_sample_logprobs, prompt)


def _top(rows: Sequence[TokenLogprobs] | None) -> Top:
    return [[(each.token, each.logprob) for each in row] for row in rows or ()]
