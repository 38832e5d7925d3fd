"""Keeps tenants apart: who asks, whose the thing is that a route names, and a rule for every route.

`keep_apart` runs before every route. For a key that is limited to a tenant it looks the route's rule up: a thing of
another tenant is answered exactly as one that was never there (404), what is everybody's cannot be changed (403), and
what concerns the whole ring takes an admin's key (403). A route without a rule takes one, too, and fails a test
(tests/redis/test_api_tenants.py). Names in bodies and queries are looked at where they are read, by the adapter store
and by `check`. Without tenants nothing of this happens.

Before that it finds the ring, where there are several: the one that the header `x-parallm-ring` names, or that has what
the route's path names.
"""

from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

from fastapi import Request

from api.callers.caller import asker
from api.generation.resume import stream_owner, unknown_stream
from api.ring.choosing import HEADER, named_ring, reached, ring_holding
from api.ring.ring import Ring
from shared.adapters import not_yours, unknown_adapter
from shared.errors import (
    ForbiddenError,
    ParallmError,
    ServiceUnavailableError,
    UnknownBatchError,
    UnknownDeadLetterError,
    UnknownFileError,
)
from shared.redis.files.batch_store import unknown_batch
from shared.redis.files.file_store import unknown_file
from shared.redis.jobs.ledger import unknown_job
from shared.redis.queue.dead_letters import unknown_letter

Kind = Literal["job", "file", "batch", "stream", "dead letter", "policy"]
Right = Literal["see", "change", "make"]


class Rule(NamedTuple):
    """Condition that a route sets on a tenant's key. Without a `kind` the route names nothing in its path."""

    who: Literal["tenant", "admin", "page"] = "tenant"  # "page": a person signs in (api/ops/dashboard/session.py)
    kind: Kind | None = None
    name: str = ""  # of the path's parameter
    right: Right = "see"  # "make": change it, or make it if it is not there


ADMIN, PAGE = Rule("admin"), Rule("page")
NOTHING = Rule()  # returns only what is no secret between tenants
LIST = Rule()  # shows what the asker sees
WORK = Rule()  # makes things of the asker's own; the models, adapters and files that it names are looked up as its


def _things(kind: Kind, name: str) -> tuple[Rule, Rule, Rule]:
    return Rule("tenant", kind, name), Rule("tenant", kind, name, "change"), Rule("tenant", kind, name, "make")


SEE_JOB, CHANGE_JOB, _ = _things("job", "job_id")
SEE_FILE, CHANGE_FILE, _ = _things("file", "file_id")
SEE_BATCH, CHANGE_BATCH, _ = _things("batch", "batch_id")
SEE_ADAPTER, CHANGE_ADAPTER, MAKE_ADAPTER = _things("policy", "name")
_, CHANGE_POLICY, MAKE_POLICY = _things("policy", "policy")
SEE_LETTER = Rule("tenant", "dead letter", "letter_id")
CHANGE_STREAM = Rule("tenant", "stream", "request_id", "change")

RULES: dict[str, Rule] = {
    # OpenAI's
    "POST /v1/completions": WORK,
    "POST /v1/chat/completions": WORK,
    "POST /v1/embeddings": WORK,
    "POST /v1/responses": WORK,  # responses and conversations are found under the asker's own name alone
    "POST /v1/responses/input_tokens": WORK,
    "POST /v1/responses/compact": WORK,
    "GET /v1/responses/{response_id}": WORK,
    "DELETE /v1/responses/{response_id}": WORK,
    "POST /v1/responses/{response_id}/cancel": WORK,
    "GET /v1/responses/{response_id}/input_items": WORK,
    "POST /v1/conversations": WORK,
    "GET /v1/conversations/{conversation_id}": WORK,
    "POST /v1/conversations/{conversation_id}": WORK,
    "DELETE /v1/conversations/{conversation_id}": WORK,
    "GET /v1/conversations/{conversation_id}/items": WORK,
    "POST /v1/conversations/{conversation_id}/items": WORK,
    "GET /v1/conversations/{conversation_id}/items/{item_id}": WORK,
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": WORK,
    "POST /v1/classifications": WORK,
    "GET /v1/models": LIST,
    "GET /models": LIST,
    "GET /v1/models/{name:path}": WORK,
    "GET /models/{name:path}": WORK,
    "GET /v1/streams/{request_id}": CHANGE_STREAM,
    "POST /v1/files": WORK,
    "GET /v1/files": LIST,
    "GET /v1/files/{file_id}": SEE_FILE,
    "GET /v1/files/{file_id}/content": SEE_FILE,
    "DELETE /v1/files/{file_id}": CHANGE_FILE,
    "POST /v1/batches": WORK,
    "GET /v1/batches": LIST,
    "GET /v1/batches/{batch_id}": SEE_BATCH,
    "POST /v1/batches/{batch_id}/cancel": CHANGE_BATCH,
    # Anthropic's
    "POST /v1/messages": WORK,
    "POST /v1/messages/count_tokens": WORK,
    "GET /api/hello": NOTHING,
    "POST /v1/messages/batches": WORK,
    "GET /v1/messages/batches": LIST,
    "GET /v1/messages/batches/{batch_id}": SEE_BATCH,
    "GET /v1/messages/batches/{batch_id}/results": SEE_BATCH,
    "POST /v1/messages/batches/{batch_id}/cancel": CHANGE_BATCH,
    "DELETE /v1/messages/batches/{batch_id}": CHANGE_BATCH,
    # Ollama's
    "GET /": NOTHING,
    "GET /api/version": NOTHING,
    "GET /api/tags": LIST,
    "GET /api/ps": LIST,
    "POST /api/show": WORK,
    "POST /api/pull": WORK,
    "POST /api/chat": WORK,
    "POST /api/generate": WORK,
    "POST /api/embed": WORK,
    "POST /api/embeddings": WORK,
    # jobs and calls of training code
    "POST /v1/jobs": WORK,
    "GET /v1/jobs": LIST,
    "GET /v1/jobs/{job_id}": SEE_JOB,
    "GET /v1/jobs/{job_id}/results": SEE_JOB,
    "GET /v1/jobs/{job_id}/stream": SEE_JOB,
    "POST /v1/jobs/{job_id}/cancel": CHANGE_JOB,
    "DELETE /v1/jobs/{job_id}": CHANGE_JOB,
    "POST /v1/jobs/{job_id}/retry": CHANGE_JOB,
    "POST /v1/rl/act": WORK,
    "POST /v1/rl/rollout": WORK,
    "POST /v1/predict": WORK,
    "POST /inference/v1/generate": WORK,
    "POST /inference/v1/abort_requests": WORK,
    "POST /generate": WORK,
    "POST /tokenize": WORK,
    "POST /detokenize": WORK,
    "POST /v1/rewards/score": WORK,
    "POST /v1/replay": WORK,  # recordings are found under the asker's own tenant alone
    # adapters
    "GET /v1/adapters": LIST,
    "POST /v1/adapters": WORK,
    "GET /v1/adapters/{name}": SEE_ADAPTER,
    "POST /v1/adapters/{name}/versions": MAKE_ADAPTER,
    "GET /v1/adapters/{name}/versions/{version}": SEE_ADAPTER,
    # To use an adapter that is there for all is not to take its weights away.
    "GET /v1/adapters/{name}/versions/{version}/adapter_config.json": CHANGE_ADAPTER,
    "GET /v1/adapters/{name}/versions/{version}/adapters.safetensors": CHANGE_ADAPTER,
    "POST /v1/adapters/{name}/rollback": CHANGE_ADAPTER,
    "POST /v1/adapters/{name}/promote": CHANGE_ADAPTER,
    "POST /v1/adapters/{name}/reject": CHANGE_ADAPTER,
    "POST /v1/adapters/{name}/best": CHANGE_ADAPTER,
    "PUT /v1/adapters/{name}/split": CHANGE_ADAPTER,
    "GET /v1/adapters/{name}/split": CHANGE_ADAPTER,  # of an adapter that is there for all: an admin's alone
    "DELETE /v1/adapters/{name}/split": CHANGE_ADAPTER,
    "DELETE /v1/adapters/{name}": CHANGE_ADAPTER,
    "DELETE /v1/adapters/{name}/versions/{version}": CHANGE_ADAPTER,
    "POST /load_adapter": WORK,
    "POST /upload_adapter": WORK,
    "POST /update_adapter_weights": WORK,
    "POST /model/switch-lora": WORK,
    "POST /v1/load_lora_adapter": WORK,
    "POST /v1/unload_lora_adapter": WORK,
    # training
    "POST /v1/training/update": WORK,
    "POST /training/checkpoint": WORK,
    "POST /v1/training/resume": WORK,
    "GET /v1/training/status": WORK,
    "GET /debug/training": WORK,
    "GET /v1/training/trajectories": WORK,
    "POST /v1/feedback": WORK,  # answers are found under the asker's own tenant alone
    "GET /v1/feedback": LIST,
    "GET /v1/sessions": LIST,
    "GET /v1/sessions/{session_id}": WORK,  # under the asker's own tenant alone
    "DELETE /v1/sessions/{session_id}": WORK,
    "PUT /v1/trainers/{policy}": MAKE_POLICY,
    "DELETE /v1/trainers/{policy}": CHANGE_POLICY,
    "POST /v1/trainers/{policy}/alerts": CHANGE_POLICY,
    "POST /v1/trainers/{policy}/orders": CHANGE_POLICY,
    "POST /v1/trainers/{policy}/orders/answers": CHANGE_POLICY,
    # Tinker's: learners, sessions, samplers and samples are found under the asker's own name alone
    "GET /api/v1/healthz": NOTHING,
    "GET /api/v1/get_server_capabilities": NOTHING,
    "POST /api/v1/client/config": NOTHING,
    "POST /api/v1/client/dynamic_config": NOTHING,
    "POST /api/v1/telemetry": NOTHING,
    "POST /api/v1/create_session": WORK,
    "POST /api/v1/session_heartbeat": WORK,
    "POST /api/v1/sessions/{session_id}/finish": WORK,
    "GET /api/v1/sessions/{session_id}": WORK,
    "POST /api/v1/create_model": WORK,
    "POST /api/v1/forward_backward": WORK,
    "POST /api/v1/forward": WORK,
    "POST /api/v1/optim_step": WORK,
    "POST /api/v1/save_weights": WORK,
    "POST /api/v1/save_weights_for_sampler": WORK,
    "POST /api/v1/load_weights": WORK,
    "POST /api/v1/get_info": WORK,
    "POST /api/v1/unload_model": WORK,
    "POST /api/v1/create_sampling_session": WORK,
    "GET /api/v1/samplers/{sampler_id}": WORK,
    "POST /api/v1/asample": WORK,
    "POST /api/v1/retrieve_future": WORK,
    "POST /api/v1/cancel_future": WORK,
    "GET /api/v1/training_runs": WORK,
    "GET /api/v1/training_runs/{run}": WORK,
    "GET /api/v1/training_runs/{run}/checkpoints": WORK,
    "GET /api/v1/checkpoints": WORK,
    "DELETE /api/v1/training_runs/{run}/checkpoints/{segment}/{name}": WORK,
    "PUT /api/v1/training_runs/{run}/checkpoints/{segment}/{name}/ttl": WORK,
    "POST /api/v1/weights_info": WORK,
    "POST /api/v1/save_weights_external": WORK,
    "GET /api/v1/training_runs/{run}/checkpoints/{segment}/{name}/archive": WORK,
    "GET /api/v1/training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls": WORK,
    "GET /api/v1/downloads/{ring_name}/{ticket}/{file}": NOTHING,
    # the ring
    "GET /health": NOTHING,
    "GET /ping": NOTHING,
    "POST /ping": NOTHING,
    "GET /version": NOTHING,
    "GET /load": NOTHING,
    "GET /server_info": NOTHING,
    "GET /tokenizer_info": WORK,
    "POST /abort_requests": WORK,
    "POST /reset_prefix_cache": ADMIN,
    "POST /classify": WORK,
    "POST /pooling": WORK,
    "POST /score": WORK,
    "POST /v1/score": WORK,
    "POST /rerank": WORK,
    "POST /v1/rerank": WORK,
    "POST /v2/rerank": WORK,
    "POST /v1/chat/completions/render": WORK,
    "GET /livez": NOTHING,
    "GET /readyz": NOTHING,
    "GET /metrics": NOTHING,
    "GET /v1/spec_decode/metrics": NOTHING,
    "GET /is_paused": NOTHING,
    "POST /pause": ADMIN,
    "POST /resume": ADMIN,
    "POST /v1/models": ADMIN,
    "PATCH /v1/models/{name:path}": ADMIN,
    "DELETE /v1/models/{name:path}": ADMIN,
    "POST /v1/models/load": ADMIN,
    "POST /v1/models/unload": ADMIN,
    "GET /v1/ring": ADMIN,
    "GET /v1/ring/snapshot": ADMIN,
    "GET /v1/deadletters": LIST,
    "GET /v1/deadletters/{letter_id:path}": SEE_LETTER,
    "POST /v1/deadletters/{letter_id:path}/requeue": ADMIN,
    "DELETE /v1/deadletters/{letter_id:path}": ADMIN,
}


def rule_of(method: str, path: str) -> Rule | None:
    """The rule of a route by its pattern; None: none is stated."""
    method = method.replace("HEAD", "GET")
    return PAGE if path == "/dashboard" or path.startswith("/dashboard/") else RULES.get(f"{method} {path}")


async def keep_apart(request: Request) -> None:
    """A dependency of every route; see above."""
    rule = rule_of(request.method, request.scope["route"].path)
    request.state.ring = ring = await _ring_of(request, rule)
    who = asker()
    if not who.limited:
        return
    rule = rule or ADMIN
    if rule.who != "tenant":
        raise ForbiddenError("this concerns the whole ring: it takes an admin's key")
    if rule.kind is not None:
        await check(ring, rule.kind, request.path_params[rule.name], rule.right)


async def _ring_of(request: Request, rule: Rule | None) -> Ring:
    """The ring that a request names, or whose thing its path names; else the process's own."""
    home: Ring = request.app.state.ring
    if name := request.headers.get(HEADER, ""):
        return reached(named_ring(home, name))
    if not home.others or rule is None or rule.kind not in _IN_ANY_RING:
        return home
    find, thing = _FINDERS[rule.kind][0], request.path_params[rule.name]

    async def has(ring: Ring) -> bool:
        try:
            owner = await find(ring, thing)
        except UnknownDeadLetterError:
            return False
        return owner is not None and asker().sees(owner)

    try:
        return await ring_holding(home, has, f"{rule.kind} '{thing[:80]}'")
    except ServiceUnavailableError:
        if rule.right == "make":
            return home
        raise


async def check(ring: Ring, kind: Kind, name: str, right: Right = "see", *, param: str | None = None) -> None:
    """NotFoundError when the asker does not see the thing, ForbiddenError when it may not change it."""
    who = asker()
    if not who.limited:
        return
    find, unknown = _FINDERS[kind]
    try:
        owner = await find(ring, name)
    except (UnknownFileError, UnknownBatchError, UnknownDeadLetterError):
        owner = None
    if owner is None and right == "make":
        return
    if owner is None or not who.sees(owner):
        error = not_yours(name) if right == "make" else unknown(name)
        error.param = param or error.param
        raise error
    if right != "see" and not who.owns(owner):
        raise ForbiddenError(f"{kind} {name[:80]!r} is no tenant's: it takes an admin's key to change it")


async def _job(ring: Ring, job_id: str) -> str | None:
    return await ring.jobs.owner(job_id)


async def _file(ring: Ring, file_id: str) -> str | None:
    return (await ring.files.find(file_id)).tenant


async def _batch(ring: Ring, batch_id: str) -> str | None:
    return (await ring.batches.find(batch_id)).spec.tenant


async def _letter(ring: Ring, letter_id: str) -> str | None:
    return await ring.dead_letters.owner(letter_id)


async def _policy(ring: Ring, name: str) -> str | None:
    return await ring.adapters.owner(name)


_IN_ANY_RING = frozenset({"job", "stream", "dead letter", "policy"})  # files and batches are in the process's own
_FINDERS: dict[Kind, tuple[Callable[[Ring, str], Awaitable[str | None]], Callable[[str], ParallmError]]] = {
    "job": (_job, unknown_job),
    "file": (_file, unknown_file),
    "batch": (_batch, unknown_batch),
    "stream": (stream_owner, unknown_stream),
    "dead letter": (_letter, unknown_letter),
    "policy": (_policy, unknown_adapter),
}
