"""Run a recipe in one process, without a ring: `python -m tests.training.run trainer/recipes/tiny-arithmetic.yaml`."""

# ruff: noqa: E402  (the faster BLAS has to be in place before mlx is imported)
from mlx_model import fast_blas

fast_blas.install()

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.process import logs
from shared.process.settings import load
from shared.text.codec import TextCodec
from tests.training.in_process import InProcessSource, MemorySink
from tests.training.nobody import NoBoard, NoOrders
from trainer.learn.compute import ThreadHost, at_once
from trainer.ring.board import RingBoard
from trainer.ring.mailbox import OrderDesk, RingMailbox
from trainer.ring.ring import TrainerRing
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.groups import RolloutSource
from trainer.runs.loop import TrainLoop
from trainer.runs.parts import Parts
from trainer.runs.rl import held_out_tasks, training_tasks
from trainer.settings import TrainSettings
from trainer.state import RunState


@asynccontextmanager
async def in_process_ring(
    settings: TrainSettings, sink: MemorySink, orders: OrderDesk | None = None
) -> AsyncIterator[tuple[ThreadHost, LoadedModel, TrainerRing]]:
    """A thread that computes, the model in it, and a ring whose samples come out of that thread."""
    async with ThreadHost() as host, RingMailbox(orders or NoOrders()) as mailbox:
        loaded: LoadedModel = await host.run(at_once(lambda: load_model(EngineConfig(settings.model))))
        source = InProcessSource(host, loaded.model, settings.adapter_shape(), sink, loaded.card.eos_token_ids)
        codec, board = TextCodec(loaded.tokenizer), RingBoard(NoBoard())
        yield host, loaded, TrainerRing(loaded.card.base_sha256, codec, source, sink, board, mailbox)


async def train(
    settings: TrainSettings,
    sink: MemorySink | None = None,
    *,
    wrap_source: Callable[[RolloutSource], RolloutSource] = lambda source: source,
    on_loop: Callable[[TrainLoop], None] = lambda loop: None,
    orders: OrderDesk | None = None,
    **parts: Any,
) -> tuple[RunState, MemorySink]:
    """Train with an in-process ring; `parts` replace what the settings would give, of the run or of its ring."""
    sink = MemorySink() if sink is None else sink
    async with in_process_ring(settings, sink, orders) as (host, loaded, ring):
        ring = replace(ring, source=wrap_source(ring.source))
        ring = replace(ring, **{name: parts.pop(name) for name in list(parts) if hasattr(ring, name)})
        tasks = training_tasks(settings, None), held_out_tasks(settings, None)
        made = Parts(host, loaded.model, ring, ChatEncoder(ring.codec), *tasks)
        loop = TrainLoop(settings, replace(made, **parts))
        on_loop(loop)
        state = await loop.run()
    return state, sink


if __name__ == "__main__":
    logs.configure()
    recipe, *flags = sys.argv[1:]
    started = time.perf_counter()
    final, _ = asyncio.run(train(load(TrainSettings, ["--config", recipe, *flags])))
    wall, cpu = time.perf_counter() - started, time.process_time()
    print(f"held-out {final.held_out}  wall {wall:.0f} s  cpu {cpu:.0f} s  tokens {final.tokens}")
