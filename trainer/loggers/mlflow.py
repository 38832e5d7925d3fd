"""MLflow: `--logger mlflow`, to `MLFLOW_TRACKING_URI` or, without it, where MLflow stores runs on this machine."""

import json
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException

from trainer.loggers.tracked_run import COLUMNS, Ending, Samples, TrackedRun, rows

PARAMS_AT_ONCE = 100  # MLflow's bound, as is the next
LONGEST_PARAM = 500
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowRun:
    """A run of MLflow, in the experiment that is named after the project."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        known = self._known(run.known_id)
        self._id: str = known.info.run_id if known is not None else self._new(run)
        self._client.update_run(self._id, status="RUNNING")

    def _known(self, run_id: str) -> Run | None:
        """The run of an earlier start, unless it has been deleted or was stored elsewhere."""
        try:
            run = self._client.get_run(run_id) if run_id else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run is not None and run.info.lifecycle_stage == "active" else None

    def _new(self, run: TrackedRun) -> str:
        """Create a run; its parameters stay those of the first start, because MLflow changes none."""
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        run_id: str = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        run.keep_id(run_id)
        params = [Param(name, _text(value)) for name, value in run.config.items()]
        for at in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=params[at : at + PARAMS_AT_ONCE])
        return run_id

    def write(self, train_step: int, figures: Mapping[str, float], samples: Samples) -> None:
        """One call for all figures; samples are a file of the run's artifacts."""
        now_ms = time.time_ns() // 1_000_000
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, now_ms, train_step) for name, value in figures.items()]
        )
        if samples:
            shown = [dict(zip(COLUMNS, row, strict=True)) for row in rows(train_step, samples)]
            self._client.log_dict(self._id, {"samples": shown}, f"samples/step-{train_step:06d}.json")

    def end(self, ending: Ending) -> None:
        """Close the run as FINISHED, KILLED or FAILED."""
        self._client.set_terminated(self._id, _STATUS[ending])


def _text(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST_PARAM]


open_run = MlflowRun
