"""The HTTP front end: `create_app(settings)` puts routes, errors and the ring together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import structlog
from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from api.adapters import routes as adapters
from api.adapters import splits
from api.admission import Admission
from api.anthropic import routes as messages
from api.batches import batch_routes as batches
from api.batches import file_routes as files
from api.batches import message_routes as message_batches
from api.batches.work import BatchWork
from api.generation.resume import stop_lingering
from api.generation.running import settled
from api.generation.tracing import telemetry
from api.http import errors
from api.http.api_keys import KeyRing
from api.http.auth import OwnOrigin, RequireKey
from api.http.context import RequestContext
from api.http.errors import describe_errors
from api.http.hosts import OwnHost, allowed_hosts
from api.http.limits import BodyLimit
from api.jobs import routes as jobs
from api.jobs import stream as job_streams
from api.ollama import models as ollama_models
from api.ollama import routes as ollama
from api.ollama import vectors as ollama_vectors
from api.openai import (
    abortions,
    chat,
    classifications,
    completions,
    embeddings,
    models,
    render,
    replies,
    similarities,
)
from api.openai.responses import compaction, conversations
from api.openai.responses import routes as responses
from api.openai.responses.background import BackgroundWork
from api.ops import catalogue, dashboard, deadletters, health, metrics, pause, prefix_cache, server_info, snapshot
from api.ops import ring_address as address
from api.ops.history_sampler import sample_forever
from api.ops.snapshot import Snapshots
from api.ring.ring import Ring
from api.rl import act, episodes, feedback, generate, predict, replay, rewards, tokenize
from api.tenants import keep_apart
from api.tinker import checkpoints as tinker_checkpoints
from api.tinker import downloads as tinker_downloads
from api.tinker import futures as tinker_futures
from api.tinker import sampling as tinker_sampling
from api.tinker import sessions as tinker_sessions
from api.tinker import training as tinker_training
from api.training import remote_trainers as trainers
from api.training import routes as training
from api.webhooks.work import WebhookWork
from shared.process.api_settings import ApiSettings
from shared.telemetry.metrics import Tally


def guard(app: FastAPI, settings: ApiSettings) -> None:
    """Put the guards in front of the app; the last added stands outermost."""
    app.add_middleware(BodyLimit, settings)
    app.add_middleware(Admission, settings)
    keys = app.state.keys = KeyRing.of(settings)
    if keys:
        app.add_middleware(RequireKey, keys)
    else:
        app.add_middleware(OwnOrigin, settings.cors_origins)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", "x-next-after", "x-parallm-unused-parameters"],
        )
    hosts = allowed_hosts(settings, keys=bool(keys))
    if hosts is not None:
        app.add_middleware(OwnHost, hosts)


log = structlog.get_logger()

ROUTED = (
    *(
        completions,
        chat,
        embeddings,
        files,
        batches,
        responses,
        compaction,
        conversations,
        classifications,
        models,
        replies,
        abortions,
    ),
    *(similarities, render, server_info, messages, message_batches),
    *(ollama, ollama_vectors, ollama_models),
    *(
        act,
        predict,
        jobs,
        job_streams,
        adapters,
        splits,
        address,
        generate,
        pause,
        prefix_cache,
        tokenize,
        training,
        trainers,
        rewards,
        replay,
        feedback,
        episodes,
    ),
    *(tinker_sessions, tinker_training, tinker_sampling, tinker_futures, tinker_checkpoints, tinker_downloads),
    *(health, catalogue, deadletters, metrics, snapshot, dashboard),
)


def create_app(settings: ApiSettings) -> FastAPI:
    """An app that joins the ring at startup; any number of processes may run one."""
    tally = Tally()
    app = FastAPI(
        dependencies=[Depends(keep_apart)],
        title="ParaLLM",
        description="OpenAI's endpoints, and rollout jobs, on a ring of MLX workers.",
        lifespan=life(settings, tally),
        responses={401: errors.described("No API key, or a wrong one.")},
        telemetry=telemetry(),
    )
    errors.install(app)
    describe_errors(app)
    for module in ROUTED:
        app.include_router(module.router)
    guard(app, settings)
    app.add_middleware(RequestContext, tally)
    return app


def find_routes(app: FastAPI) -> None:
    """Have FastAPI look at all routes now: it would do so in the first requests, which takes a tenth of a second."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "", "headers": []})


def life(settings: ApiSettings, tally: Tally) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Lifespan of the app: starts the ring and the background tasks, and stops them after the last request."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ring = Ring(settings, tally)
        app.state.ring = ring
        await ring.start()
        app.state.snapshots = {each.name: Snapshots(each) for each in ring.all}
        sampling = asyncio.create_task(sample_forever(ring, app.state.snapshots[ring.name]))
        app.state.background = BackgroundWork(ring)
        work = [asyncio.create_task(each.run()) for each in (BatchWork(ring), app.state.background, WebhookWork(ring))]
        log.info("api.started", api=ring.api_id)
        try:
            yield
        finally:
            ring.shutting_down = True
            sampling.cancel()
            for task in work:
                task.cancel()
            await asyncio.gather(sampling, *work, return_exceptions=True)
            stop_lingering()
            await settled()
            await ring.stop()
            log.info("api.stopped", api=ring.api_id)

    return lifespan
