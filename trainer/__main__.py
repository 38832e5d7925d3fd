"""`mlx_parallm_train`: learn from rollouts of a running ring, and publish what was learned to it.

A process of its own, on any machine that reaches the ring's Redis and has the model's files; or several that divide
the model (trainer/learners/group.py).
"""

import asyncio
import os
import sys

import structlog

from mlx_model import fast_blas
from ranks.children import take_place
from ranks.placement import Placement
from shared.errors import ParallmError, ServiceUnavailableError, SetupError
from shared.machine.awake import stay_awake
from shared.process import logs
from shared.process.garbage import no_collections
from shared.process.open_files import many_files
from shared.process.settings import load
from shared.redis.connection.client import require
from shared.telemetry import tracing
from trainer.learners.placing import placement
from trainer.runs import stopping
from trainer.runs.team import agents_of
from trainer.settings import TrainSettings

log = structlog.get_logger()


def main(argv: list[str] | None = None) -> int:
    """Train until all steps are done or SIGTERM comes; a second one ends at once. The process's exit code."""
    placed: Placement | None = None
    try:
        settings = load(TrainSettings, argv, rehearse=_rehearse)
        logs.configure(settings.log_level, settings.log_json)
        stay_awake(settings.keep_awake)
        tracing.start(settings.otlp_endpoint, "trainer")
        placed = placement(settings)
        if placed is None or not placed.rank:  # the run is rank 0's
            settings.check()
        team = agents_of(argv, settings.agents) if settings.agents is not None else []
        if placed is not None:
            take_place(settings, placed)
        fast_blas.install()
        code = asyncio.run(_train(settings, team) if placed is None else _train_in_group(settings, placed))
    except ServiceUnavailableError as error:  # may pass, so that a supervisor tries again
        print(f"mlx_parallm_train: {error}", file=sys.stderr)
        code = 1
    except ParallmError as error:
        print(f"mlx_parallm_train: {error}", file=sys.stderr)
        code = 2
    except RuntimeError as error:
        from mlx_model.device import gave_out  # mlx is imported by now, and must not be earlier

        if not gave_out(error):
            raise
        hint = "The last checkpoint counts: start the run again, with fewer processes on this GPU if it lacked memory."
        print(f"mlx_parallm_train: the GPU gave out: {error}. {hint}", file=sys.stderr)
        code = 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("mlx_parallm_train: interrupted; the last checkpoint counts", file=sys.stderr)
        code = 130
    finally:
        tracing.stop()
        stopping.ended()
    if placed is not None:  # a thread that is stuck in a sum lets no interpreter end in order
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _rehearse(settings: TrainSettings) -> str:
    """Check that the model fits into this machine's memory, as a start does; the line about it."""
    placed = placement(settings)
    if settings.mode == "ppo" or settings.learner == "service":
        return ""  # no model is loaded here
    fast_blas.install()
    # These import mlx, so only after fast_blas.install.
    from mlx_model.config import EngineConfig, memory_config
    from mlx_model.loader import check_model

    memory = memory_config(settings, learner_rank=settings.lora_rank, serves=False)
    config = EngineConfig(settings.model, dtype=settings.dtype or None, memory=memory)
    return check_model(config, 1 if placed is None or settings.distributed_sharding == "data" else placed.size)


async def _train(settings: TrainSettings, team: list[TrainSettings]) -> int:
    # These import mlx, so only after fast_blas.install.
    with no_collections(), many_files():
        from mlx_model.config import EngineConfig, memory_config
        from mlx_model.loader import LoadedModel, load_model
        from trainer.learn.compute import ThreadHost, at_once
        from trainer.runs.kinds import learn

    async with ThreadHost() as host:
        memory = memory_config(settings, learner_rank=settings.lora_rank, serves=False)
        config = EngineConfig(settings.model, dtype=settings.dtype or None, memory=memory)

        async def loaded() -> LoadedModel:
            return await host.run(at_once(lambda: load_model(config)))

        await learn(settings, team, host, loaded)
    return 0


async def _train_in_group(settings: TrainSettings, placed: Placement) -> int:
    with no_collections(), many_files():  # likewise
        from trainer.learners.group import follow, leading
        from trainer.runs.kinds import learn
    ranks = settings.model_copy()  # the run itself may need the api
    await ranks.join()
    if not ranks.redis:
        raise SetupError("ranks find one another in a ring: give its Redis (--redis) or an api of it (--connect-to)")
    await require(ranks.redis)
    if placed.rank:
        return await follow(ranks, placed)
    async with leading(ranks, placed) as leads:
        await leads.run(learn(settings, [], leads.host, leads.loaded, leads.begun))
    return 0


if __name__ == "__main__":
    sys.exit(main())
