"""From settings to environments: the tasks to train on, and the held-out ones."""

from collections.abc import Mapping
from typing import Any

from shared.errors import SetupError
from trainer.environments import ArithmeticEnvironment, DatasetEnvironment, Environment, Scorer, read_jsonl
from trainer.own_code import OwnEnvironment
from trainer.settings import TrainSettings

_HELD_OUT_SEED = 7


def training_tasks(settings: TrainSettings, scorer: Scorer | None) -> Environment:
    """What the run learns from; `scorer` is needed for data sets."""
    if settings.task == "arithmetic":
        return ArithmeticEnvironment(settings.seed, "train", settings.task_count)
    if settings.task in ("jsonl", "gsm8k"):
        if settings.dataset is None:
            raise SetupError(f"task {settings.task!r} needs a dataset")
        tasks = read_jsonl(settings.dataset, settings.task_count)
        return DatasetEnvironment(settings.task, tasks, _needed(scorer), settings.seed, settings.system_prompt)
    return _own(settings, settings.task_options)


def held_out_tasks(settings: TrainSettings, scorer: Scorer | None) -> Environment | None:
    """What the run is measured on; the training tasks when there are a few fixed ones; None when there is nothing."""
    if settings.task == "arithmetic":
        if settings.task_count:
            return ArithmeticEnvironment(settings.seed, "train", settings.task_count)
        return ArithmeticEnvironment(_HELD_OUT_SEED, "held_out")
    if settings.held_out_dataset is not None:
        tasks = read_jsonl(settings.held_out_dataset)
        return DatasetEnvironment("held-out", tasks, _needed(scorer), system_prompt=settings.system_prompt)
    if settings.held_out_options:
        return _own(settings, settings.held_out_options)
    return None


def scored_tasks(settings: TrainSettings) -> bool:
    """Whether the tasks need a scorer: data sets do, environments judge by themselves."""
    return settings.task in ("jsonl", "gsm8k") or settings.held_out_dataset is not None


def _own(settings: TrainSettings, options: Mapping[str, Any]) -> Environment:
    """To be entered before it is asked anything: then it is loaded."""
    if ":" not in settings.task:
        raise SetupError(f"no task {settings.task!r}: arithmetic, jsonl, gsm8k, or package.module:Class")
    return OwnEnvironment(settings.task, options, settings.own_code_timeout_s)


def _needed(scorer: Scorer | None) -> Scorer:
    if scorer is None:
        raise SetupError("a data set needs a reward")
    return scorer
