"""`mlx_parallm_train`: learn from rollouts of a running ring, and publish what was learned to it.

A process of its own, on any machine that reaches the ring's Redis and has the model's files.
"""

import asyncio
import sys
from typing import Any

import structlog

from shared.errors import ParallmError, ServiceUnavailableError
from shared.process import logs
from shared.process.garbage import no_collections
from shared.process.settings import load
from shared.telemetry import tracing
from trainer import stopping
from trainer.agents.team import agents_of
from trainer.settings import TrainSettings
from worker.engine.model import fast_blas

log = structlog.get_logger()


def main(argv: list[str] | None = None) -> int:
    """Train until all steps are done or SIGTERM comes; a second one ends at once. The process's exit code."""
    try:
        settings = load(TrainSettings, argv)
        logs.configure(settings.log_level, settings.log_json)
        tracing.start(settings.otlp_endpoint, "trainer")
        settings.check()
        team = agents_of(argv, settings.agents) if settings.agents is not None else []
        fast_blas.install()
        return asyncio.run(_train(settings, team))
    except ServiceUnavailableError as error:  # may pass, so that a supervisor tries again
        print(f"mlx_parallm_train: {error}", file=sys.stderr)
        return 1
    except ParallmError as error:
        print(f"mlx_parallm_train: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("mlx_parallm_train: interrupted; the last checkpoint counts", file=sys.stderr)
        return 130
    finally:
        tracing.stop()
        stopping.ended()


async def _train(settings: TrainSettings, team: list[TrainSettings]) -> int:
    # These import mlx, so only after fast_blas.install.
    with no_collections():
        from trainer.agents.runs import Agents, train_agents
        from trainer.datasets.run import DataRun, train_on_data
        from trainer.distilling.run import DistillRun
        from trainer.heads.run import HeadRun
        from trainer.learn.compute import ThreadHost, at_once
        from trainer.loop import TrainLoop
        from trainer.ppo.run import PpoRun, train_network
        from trainer.run import train
        from trainer.shares.member import Member, take_part
        from trainer.tuning.run import TuneRun
        from worker.engine.messages import EngineConfig
        from worker.engine.model.loader import LoadedModel, load_model

    running = asyncio.current_task()
    assert running is not None

    def begun(training: TrainLoop | DataRun[Any] | PpoRun | Member) -> None:
        def stop() -> None:
            log.info("train.stopping", hint="a checkpoint is saved after this train step; again: end at once")
            training.stop()

        stopping.obey(stop, lambda: training.stopping, running.cancel)

    def stop_all(agents: Agents) -> None:
        stopping.obey(agents.stop, lambda: agents.stopping, running.cancel)

    async with ThreadHost() as host:
        config = EngineConfig(settings.model, dtype=settings.dtype or None)

        async def loaded() -> LoadedModel:
            return await host.run(at_once(lambda: load_model(config)))

        if settings.join_run:
            await take_part(settings, host, loaded, begun)
        elif team:
            await train_agents(team, host, loaded, stop_all)
        elif settings.mode == "reward":
            await train_on_data(HeadRun, settings, host, loaded, begun)
        elif settings.mode == "ppo":
            await train_network(settings, host, begun)
        elif settings.mode == "rl":
            await train(settings, host, loaded, begun)
        elif settings.mode == "distill":
            await train_on_data(DistillRun, settings, host, loaded, begun)
        else:
            await train_on_data(TuneRun, settings, host, loaded, begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
