"""What an engine of several ranks may not do, or does otherwise: whatever depends on a clock or a disk of one rank."""

from __future__ import annotations

import math
from dataclasses import replace

from shared.errors import SetupError
from worker.engine.messages import EngineConfig


def in_lockstep(config: EngineConfig) -> EngineConfig:
    """The configuration, with no decision left to the clock of a rank."""
    speculation = config.speculation and replace(config.speculation, adapts_to_time=False, reads_beside=False)
    return replace(config, lane_s=math.inf, speculation=speculation)


def check_settings(config: EngineConfig) -> None:
    """SetupError that names what several ranks cannot have."""
    if config.disk is not None:
        raise SetupError("a worker of several ranks keeps no KV on disk: leave --ssd-folder out")
    if config.speculation is not None and config.speculation.draft_model:
        raise SetupError("a worker of several ranks has no draft model: leave --draft-model-path out")
