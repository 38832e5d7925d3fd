"""The HTTP front end: `create_app(settings)` puts routes, errors and the ring together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import structlog
from fastapi import Depends, FastAPI

from api import errors
from api.context import RequestContext
from api.generation import settled
from api.guards import guard
from api.openai import (
    abortions,
    batches,
    chat,
    classifications,
    completions,
    embeddings,
    files,
    models,
    pooling,
    render,
    responses,
    similarities,
    streams,
)
from api.openai.batch_work import BatchWork
from api.openapi import describe_errors
from api.ops import dashboard, deadletters, health, metrics, server_info, snapshot
from api.ops.sampling import sample_forever
from api.ops.snapshot import Snapshots
from api.resume import stop_lingering
from api.ring import Ring
from api.rl import (
    act,
    adapters,
    address,
    generate,
    jobs,
    pause,
    predict,
    prefix_cache,
    rewards,
    tokenize,
    trainers,
    training,
)
from api.tenants import keep_apart
from api.tracing import telemetry
from shared.metrics import Tally
from shared.settings import ApiSettings

log = structlog.get_logger()

ROUTED = (
    *(completions, chat, embeddings, files, batches, responses, classifications, models, streams, abortions),
    *(similarities, pooling, render, server_info),
    *(act, predict, jobs, adapters, address, generate, pause, prefix_cache, tokenize, training, trainers, rewards),
    *(health, deadletters, metrics, snapshot, dashboard),
)


def create_app(settings: ApiSettings) -> FastAPI:
    """An app that joins the ring at startup; any number of processes may run one."""
    tally = Tally()
    app = FastAPI(
        dependencies=[Depends(keep_apart)],
        title="ParaLLM",
        description="OpenAI's endpoints, and rollout jobs, on a ring of MLX workers.",
        lifespan=_life(settings, tally),
        responses={401: {"model": errors.ErrorBody, "description": "No API key, or a wrong one."}},
        telemetry=telemetry(),
    )
    errors.install(app)
    describe_errors(app)
    for module in ROUTED:
        app.include_router(module.router)
    guard(app, settings)
    app.add_middleware(RequestContext, tally)
    return app


def _life(settings: ApiSettings, tally: Tally) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """What runs beside the requests, from the first to the last of them."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ring = Ring(settings, tally)
        app.state.ring = ring
        await asyncio.to_thread(dashboard.warm_up)
        await ring.start()
        app.state.snapshots = Snapshots(ring)
        sampling = asyncio.create_task(sample_forever(ring, app.state.snapshots))
        batch_work = asyncio.create_task(BatchWork(ring).run())
        log.info("api.started", api=ring.api_id)
        try:
            yield
        finally:
            ring.shutting_down = True
            sampling.cancel()
            batch_work.cancel()
            await asyncio.gather(sampling, batch_work, return_exceptions=True)
            stop_lingering()
            await settled()
            await ring.stop()
            log.info("api.stopped", api=ring.api_id)

    return lifespan
