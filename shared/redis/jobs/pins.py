"""Pins of a job, which protect the adapter versions that it names from deletion: its own, and those of its reward."""

import contextlib

from shared.errors import InvalidRequestError, UnknownAdapterError
from shared.jobs import JobSpec
from shared.redis.adapters.store import AdapterStore
from shared.rewards.kinds import check

PIN_S = 86_400.0  # renewed by every tick


async def pin(adapters: AdapterStore, spec: JobSpec) -> None:
    """Pin the job's versions, or renew the pins; UnknownAdapterError when the job's own version has gone.

    That a reward model has gone is an error of each sample, as everything that goes wrong with it.
    """
    await adapters.pin_all(spec.adapter, _owner(spec), PIN_S)
    for model in _scoring(spec):
        with contextlib.suppress(UnknownAdapterError):
            await adapters.pin_all(model, _owner(spec), PIN_S)


async def unpin(adapters: AdapterStore, spec: JobSpec) -> None:
    """Remove the pins that the job has set on its adapters."""
    for reference in (spec.adapter, *_scoring(spec)):
        await adapters.unpin_all(reference, _owner(spec))


def _owner(spec: JobSpec) -> str:
    return f"job:{spec.id}"


def _scoring(spec: JobSpec) -> tuple[str, ...]:
    try:
        return () if spec.reward is None else check(spec.reward).served_models
    except InvalidRequestError:  # of a job that another release has taken
        return ()
