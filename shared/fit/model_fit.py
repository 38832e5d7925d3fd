"""The check that one model fits beside what runs already, for a worker, a trainer or the learners' service."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.fit.needs import WORKING_BYTES, ModelFacts, Need, total
from shared.fit.plan import (
    LEAST_TOKENS,
    Alternative,
    Demand,
    MemoryPlan,
    Room,
    gb,
    plan,
    refusal,
    room_in,
    with_need,
)
from shared.fit.reservations import RESERVATIONS, Reservation, Reservations
from shared.fit.weights import tensors_in
from shared.machine.memory import machine_memory


@dataclass(frozen=True)
class Device:
    """Where MLX computes, as far as it decides how much memory there is."""

    gpu_bytes: int = 0  # that the GPU may hold; 0: MLX computes on the CPU
    gpu_is_apart: bool = False  # the GPU has memory of its own
    pool: str = "machine"  # the name by which processes that share it know it
    float_bytes: int = 0  # that the weights' floats are cast to; 0: as in the files
    kv_number_bytes: int = 2


@dataclass(frozen=True)
class Asked:
    """Memory that a process's settings ask for."""

    purpose: str  # for people: "worker of mlx-community/..."
    context: int = LEAST_TOKENS
    kv_bytes: int = 0  # 0: what the machine has left
    kv_bits: int = 0
    kv_group: int = 64
    prefix_bytes: int = 0
    adapter_slots: int = 0
    learner_rank: int = 0  # of an adapter that learns here, too; 0: none
    limit_bytes: int = 0  # --memory-limit
    ranks: int = 1
    sees: bool = True
    serves: bool = True
    draft: Path | None = None  # folder of the model that drafts


def fit_model(
    folder: Path,
    config: Mapping[str, Any],
    asked: Asked,
    device: Device,
    draft_config: Mapping[str, Any] | None = None,
    *,
    keeps: bool = False,
    reservations: Reservations = RESERVATIONS,
) -> MemoryPlan:
    """The plan of a model's memory; SetupError with all numbers where it does not fit. `keeps`: reserve it."""
    facts, draft = facts_of(folder, config, asked, device, draft_config)
    demand = demand_of(facts, asked, draft)

    def decide(everybody: list[Reservation]) -> tuple[MemoryPlan, Reservation]:
        others = [each for each in everybody if each.pool == device.pool]
        room = room_in(
            machine_memory(),
            others,
            limit_bytes=asked.limit_bytes,
            gpu_bytes=device.gpu_bytes,
            gpu_is_apart=device.gpu_is_apart,
        )
        # A limit of our own is not divided: it counts alone.
        planned = plan(demand, room, 0 if asked.limit_bytes else len(others))
        if planned is None:
            raise refusal(asked.purpose, demand, room, list(_alternatives(facts, asked, draft, demand, room)))
        firm = planned.firm_bytes + (asked.kv_bytes or 0)
        return planned, Reservation(os.getpid(), asked.purpose, firm, device.pool)

    return reservations.reserve(decide) if keeps else decide(reservations.others(device.pool))[0]


def facts_of(
    folder: Path,
    config: Mapping[str, Any],
    asked: Asked,
    device: Device,
    draft_config: Mapping[str, Any] | None = None,
) -> tuple[ModelFacts, ModelFacts | None]:
    """A model's properties, and those of the model that drafts for it, if there is one."""
    facts = ModelFacts(
        tensors_in(folder), config, device.float_bytes, device.kv_number_bytes, asked.ranks, sees=asked.sees
    )
    if asked.draft is None:
        return facts, None
    return facts, ModelFacts(tensors_in(asked.draft), draft_config or {}, device.float_bytes, device.kv_number_bytes)


def demand_of(facts: ModelFacts, asked: Asked, draft: ModelFacts | None = None) -> Demand:
    """All that a process with this model takes, and with a `draft` model, which stores plain KV of the same rows."""
    needs, kv_bytes = facts.weights(), facts.kv_bytes_per_token(asked.kv_bits, asked.kv_group)
    if draft is not None:
        needs.append(Need("draft model", total(draft.weights())))
        kv_bytes += draft.kv_bytes_per_token()
    if asked.adapter_slots:
        needs += facts.adapters(asked.adapter_slots)
    if asked.learner_rank:
        needs += facts.learner(asked.learner_rank)
    needs.append(Need("working memory", WORKING_BYTES))
    return Demand(
        needs=tuple(needs),
        kv_bytes_per_token=kv_bytes,
        least_tokens=min(LEAST_TOKENS, asked.context),
        kv_bytes=asked.kv_bytes,
        prefix_bytes=asked.prefix_bytes,
        serves=asked.serves,
    )


def _alternatives(
    facts: ModelFacts, asked: Asked, draft: ModelFacts | None, demand: Demand, room: Room
) -> Iterator[Alternative]:
    """Changes of the settings, and of the model, from the smallest on."""
    if asked.kv_bytes:
        least = replace(demand, kv_bytes=0)
        if (planned := plan(least, room)) is not None:
            left = planned.room.usable - planned.firm_bytes
            rows = left // max(1, demand.kv_bytes_per_token * demand.least_tokens)
            shown = f"{left // 10_000_000 / 100:g}"
            most = f" (about {rows} rows of {demand.least_tokens:,} tokens)" if demand.kv_bytes_per_token else ""
            yield Alternative(f"--kv-memory-gb {shown} at most{most}, or leave it out", least)
    if asked.adapter_slots > 1:
        fewer_slots = demand_of(facts, replace(asked, adapter_slots=1), draft)
        yield Alternative("--adapter-slots 1", fewer_slots)
    if draft is not None:
        yield Alternative("no --draft-model-path", demand_of(facts, asked))
    if asked.serves and not asked.kv_bits and not asked.kv_bytes:
        for bits in (8, 4):
            yield Alternative(f"--kv-bits {bits}", demand_of(facts, replace(asked, kv_bits=bits), draft))
    for bits in (8, 4):
        size = facts.in_bits(bits)
        if size and size < demand.needs[0].bytes:
            yield Alternative(
                f"the model quantised to {bits} bits (weights of about {gb(size)})", with_need(demand, "weights", size)
            )
    if asked.ranks == 1 and demand.needs[0].bytes > room.usable // 2:
        halved = with_need(demand, "weights", demand.needs[0].bytes // 2)
        yield Alternative("two machines that divide it (docs/internals/groups.md, --distributed-hostfile)", halved)
