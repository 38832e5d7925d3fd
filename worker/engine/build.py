"""An engine with its model and its adapters, as a worker runs it; the same on every rank of a group."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_model.batching import check_batch
from mlx_model.config import EngineConfig, SlotConfig
from mlx_model.kv.apart import PLACES
from mlx_model.loader import LoadedModel, head_size, load_model
from shared.frames import TokenEvent
from worker.engine.adapter_slots import AdapterSlots
from worker.engine.batch.adapters import AdapterStats
from worker.engine.engine import Engine
from worker.engine.orders import EngineParts, Order
from worker.engine.turns import RankReport, TurnFacts
from worker.engine.warm_up import WarmUp, begun

log = logging.getLogger(__name__)

OFF_WHERE_INVARIANT = ("speculation", "shared_prompts", "images", "networks", "routed_experts", "decode_kernels")
OnAdapters = Callable[[AdapterStats], None]  # called in thread G after loads and failures; must be quick


class OtherRanks(Protocol):
    """The other ranks of a group, as rank 0's thread G sees them."""

    def join(self) -> Any:
        """Connect to them; a group of MLX. SetupError when that cannot be."""

    def ready(self, loaded: LoadedModel) -> None:
        """Wait until all have loaded what we have; SetupError when it is something else."""

    def turn(self, orders: Sequence[Order], seen: RankReport) -> TurnFacts:
        """Let them take a turn that begins with these orders; what all of us know in it."""

    def turned(self, events: Sequence[TokenEvent]) -> None:
        """Report the events of this rank's latest turn, to be compared with the other ranks'."""


def build(
    config: EngineConfig,
    adapters: SlotConfig | None,
    group: Any | None,
    wake: Callable[[], None],
    on_adapters: OnAdapters = lambda stats: None,
) -> EngineParts:
    """Load the model and what belongs to it, in the thread that will use it; SetupError when that cannot be.

    `group`: of MLX, whose ranks all do this at the same time.
    """
    loaded = load_model(config, group)
    with nullcontext() if group is None else mx.stream(generation_stream):  # one stream for all sums of a group
        check_batch(loaded.model, config.max_rows)
        if config.batch_invariant:
            log.warning("engine.batch_invariant places=%d off=%s", PLACES, ",".join(OFF_WHERE_INVARIANT))
        config = begun(config, head_size(loaded.config), loaded.tuning)
        config = replace(config, prefix_cache_bytes=loaded.prefix_bytes)
        slots = None if adapters is None else AdapterSlots(loaded, adapters, wake, on_adapters)
        engine = Engine(loaded, config, slots, wake)
        return EngineParts(loaded, engine, slots, WarmUp(loaded, config, engine, slots))
