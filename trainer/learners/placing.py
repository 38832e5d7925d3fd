"""Whether a trainer is one of several ranks, and what such a one does not do. Loads no MLX."""

import os
from collections.abc import Mapping

from ranks.placement import Placement, place
from shared.errors import SetupError
from trainer.settings import TrainSettings


def placement(settings: TrainSettings, environment: Mapping[str, str] = os.environ) -> Placement | None:
    """None: it is one process. SetupError names what contradicts something, or cannot be."""
    placed = place(settings, "trainer", settings.run_name, environment)
    if placed is not None:
        check(settings)
    return placed


def check(settings: TrainSettings) -> None:
    """SetupError that names what several ranks do not learn, or not in this way."""
    if settings.distributed_sharding == "data":
        _check_by_data(settings)
    alone = "it is for a process that has the whole model"
    refused = {
        "--over-http": (settings.over_http, "its ranks meet in the ring's Redis"),
        f"--mode {settings.mode}": (
            settings.mode == "ppo",
            "a network that learns from environments is small, and whole",
        ),
        f"--lora-kind {settings.lora_kind}": (
            settings.lora_kind != "lora" and settings.distributed_sharding != "data",
            "no rank knows the norms of whole weights",
        ),
        f"--learner {settings.learner}": (settings.learner != "own", alone),
        "--join-run": (bool(settings.join_run), alone),
        "--federation": (bool(settings.federation), alone),
        "--agents": (settings.agents is not None, alone),
        f"--distributed-sharding {settings.distributed_sharding}": (
            settings.distributed_sharding == "pipeline",
            "gradients are summed over ranks that divide each layer (tensor), or the samples (data)",
        ),
    }
    for flag, (asked, why) in refused.items():
        if asked:
            raise SetupError(f"{flag} cannot be had by a trainer of several ranks: {why}")


def _check_by_data(settings: TrainSettings) -> None:
    """SetupError that names what ranks cannot learn each from a part of the samples."""
    if settings.mode == "reward":
        why = "a head's gradients are not summed over samples"
        raise SetupError(f"--mode {settings.mode} cannot be had with --distributed-sharding data: {why}")
