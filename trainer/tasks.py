"""From settings to environments: the tasks to train on, and the held-out ones."""

from collections.abc import Mapping
from typing import Any

from shared.errors import SetupError
from trainer.environments import ArithmeticEnvironment, DatasetEnvironment, Environment, Scorer, load_class, read_jsonl
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
    return _own(settings.task, settings.task_options)


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
        return _own(settings.task, settings.held_out_options)
    return None


def scored_tasks(settings: TrainSettings) -> bool:
    """Whether the tasks need a scorer: data sets do, environments judge by themselves."""
    return settings.task in ("jsonl", "gsm8k") or settings.held_out_dataset is not None


def _own(path: str, options: Mapping[str, Any]) -> Environment:
    if ":" not in path:
        raise SetupError(f"no task {path!r}: arithmetic, jsonl, gsm8k, or package.module:Class")
    return load_class(path, options)


def _needed(scorer: Scorer | None) -> Scorer:
    if scorer is None:
        raise SetupError("a data set needs a reward")
    return scorer
