"""How a host divides its machine's memory among the models that it offers. Pure, but for `machine_room`.

A worker of today takes half of what its model leaves for KV. With several models in turn the next one would find that
taken. So each gets a limit of its own: what it needs, and an equal part of what would be left with the largest models
loaded, which does not depend on the order in which they are loaded.
"""

import heapq
from collections.abc import Collection, Mapping

from shared.fit.model_fit import Device
from shared.fit.plan import room_in
from shared.fit.reservations import RESERVATIONS
from shared.machine.memory import footprint, machine_memory


def machine_room(device: Device, limit_bytes: int, workers: Collection[int]) -> int:
    """Bytes that all of a host's models may take. `workers`: process ids of its own, whose memory is among it.

    `limit_bytes`: that the user allows; 0: what the machine has.
    """
    others = [each for each in RESERVATIONS.others(device.pool) if each.pid not in workers]
    room = room_in(
        machine_memory(),
        others,
        limit_bytes=limit_bytes,
        gpu_bytes=device.gpu_bytes,
        gpu_is_apart=device.gpu_is_apart,
    )
    if limit_bytes or device.gpu_bytes:
        return room.usable
    return room.usable + sum(map(footprint, workers))


def limit_of(model: str, needs: Mapping[str, int], room_bytes: int, most_models: int) -> int:
    """Bytes that one model's worker may take. `needs`: of all models that the host offers, in bytes.

    `most_models`: that it holds at once; 0: as many as fit. The limits of any that fit by their needs fit together.
    """
    at_once = min(most_models or len(needs), len(needs))
    largest = sum(heapq.nlargest(at_once, needs.values()))
    return needs[model] + max(0, room_bytes - largest) // at_once
