"""Requests to heads: which one is meant, and what it says of each text.

Each text is a sequence of kind "head" in the same queue, read under the version that the request was admitted with,
also where the request follows: which head is meant, and what its outputs are called, was chosen by that version.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from api.generation.plan import plain_sequences
from api.generation.running import gather_all
from api.generation.target import Target
from api.ring.ring import Ring
from shared.errors import InvalidRequestError
from shared.heads import HeadKind, Heads, HeadSpec, choose
from shared.redis.adapters.catalog import missing_head


def heads_of(target: Target) -> Heads:
    """The heads that the target's rows may ask for: of its version, and of the model itself."""
    own = target.admitted.manifest.heads if target.admitted is not None else {}
    return {**target.served.card.heads, **own}


async def wanted_head(
    ring: Ring, target: Target, kind: HeadKind, name: str = "", usual: str = ""
) -> tuple[str, HeadSpec]:
    """The head that is meant (`shared.heads.choose`); InvalidRequestError, with versions that have one, without it."""
    heads = heads_of(target)
    if not (chosen := choose(heads, kind, name, usual=usual)):
        id = target.served.card.name if target.admitted is None else target.admitted.id
        raise InvalidRequestError(await missing_head(ring.adapters, id, kind, name), param="head" if name else "model")
    return chosen, heads[chosen]


async def read_by_head(
    ring: Ring, target: Target, head: str, prompts: Sequence[Sequence[int]]
) -> list[npt.NDArray[np.float32]]:
    """A head's outputs for each prompt."""
    if target.admitted is not None:
        target = replace(target, adapter=target.admitted.id, policy="pin")
    sequences = plain_sequences("head", target, ring.settings, prompts, kind="head", head=head)
    return [np.frombuffer(events[-1].embedding or b"", "<f4") for events in await gather_all(ring, sequences)]
