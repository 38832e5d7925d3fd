"""A model as its host has to know it before it is loaded; its spare (`spare.py`) finds this: the host has no MLX."""

import os

import msgspec

from shared.errors import ParallmError
from shared.fit.model_fit import Device
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.sequences import ModelCard
from shared.text.codec import TokenizerBundle

FURTHER_ROWS = 3  # of the shortest useful length, that a worker is to have KV for in addition to one
PROCESS_BYTES = 400 << 20  # Python, MLX and their libraries


class Described(msgspec.Struct, frozen=True):
    """A model as a host knows it."""

    card: ModelCard
    tokenizer: TokenizerBundle
    family: str  # `model_type`
    weight_bytes: int
    need_bytes: int  # all that its worker needs
    device: Device


class Answer(msgspec.Struct, frozen=True):
    """One model's description, or why there is none."""

    described: Described | None = None
    why: str = ""


def describe(settings: dict[str, str]) -> Answer:
    """Describe the model of a worker's settings, given as variables; one of the hub is fetched first."""
    from mlx_model.loader import describe_model
    from worker.engine.messages import engine_config

    os.environ.update(settings)
    try:
        found = describe_model(engine_config(load(WorkerSettings, [])))
    except ParallmError as error:
        return Answer(why=str(error))
    except Exception as error:  # of a library, over one model's files: the others can be described
        return Answer(why=f"{type(error).__name__}: {error}")
    finally:
        for name in settings:
            os.environ.pop(name, None)
    need = found.demand.firm + PROCESS_BYTES
    if not found.demand.kv_bytes:
        need += FURTHER_ROWS * found.demand.least_kv
    return Answer(Described(found.card, found.tokenizer, found.family, found.weight_bytes, need, found.device))
