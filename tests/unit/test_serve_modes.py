"""What the modes of `mlx_parallm_serve` start, and which settings contradict each other."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from api.serve.main import LEARNERS, TRAINER, check_modes, night_spec, worker_spec
from shared.errors import SetupError
from shared.process.serve_settings import ServeSettings


def settings(**changes: Any) -> ServeSettings:
    return ServeSettings.model_construct(**(ServeSettings().model_dump() | changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mode": "training_only", "workers": 0}, "needs a worker"),
        ({"enable_rl_training": True, "train_config": Path("/no/such.yaml")}, "/no/such.yaml: no such file"),
        ({"train_config": Path("run.yaml")}, "--train-config is for a hosted trainer"),
        ({"mode": "inference", "lora_rank": 4}, "--lora-rank is for a hosted trainer"),
        ({"learners": 2, "workers": 0}, "--learners needs a worker"),
        ({"learners": 2, "mode": "inference_and_training"}, "has a guest already"),
        ({"learners": 2, "guest": "a:B"}, "has a guest already"),
        ({"atropos_url": "http://localhost:8001"}, "--atropos-url is for a hosted trainer"),
        ({"training_share": 0.5}, "--training-share is for a hosted trainer"),
        ({"training_pause_ms": 5}, "--training-pause-ms is for a hosted trainer"),
        ({"end_with_guest": True}, "--end-with-guest is for a hosted trainer"),
        ({"suite": Path("s.jsonl")}, "add --learn-when"),
        ({"learn_when": "idle", "uds": Path("a.sock")}, "over a port"),
        ({"learn_when": "idle", "suite": Path("/no/such.jsonl")}, "/no/such.jsonl: no such file"),
        ({"learn_when": "idle", "host": "192.168.0.7"}, "--host 0.0.0.0"),
        ({"mode": "training_only", "guest": "a:B"}, "--guest a:B: the first worker's guest is the trainer"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        check_modes(settings(**changes))


@pytest.mark.parametrize("mode", ["inference", "inference_only"])
def test_without_training_no_worker_has_a_guest(mode: str) -> None:
    assert worker_spec(settings(mode=mode), 0).environment["PARALLM_GUEST"] == ""


@pytest.mark.parametrize("changes", [{"mode": "inference_and_training"}, {"enable_rl_training": True}])
def test_the_first_worker_hosts_the_trainer(changes: dict[str, Any]) -> None:
    made = settings(workers=2, lora_rank=4, atropos_url="http://localhost:8001", training_share=0.3, **changes)
    check_modes(made)
    first, second = worker_spec(made, 0), worker_spec(made, 1)
    assert (first.environment["PARALLM_GUEST"], second.environment["PARALLM_GUEST"]) == (TRAINER, "")
    assert first.environment["PARALLM_LORA_RANK"] == "4"
    assert first.environment["PARALLM_ATROPOS_URL"] == "http://localhost:8001"
    assert first.environment["PARALLM_TRAINING_SHARE"] == "0.3"
    assert not first.ends, "it goes on serving"


def test_the_first_worker_hosts_the_training_service() -> None:
    made = settings(workers=2, learners=3, training_share=0.5)
    check_modes(made)
    first, second = worker_spec(made, 0), worker_spec(made, 1)
    assert (first.environment["PARALLM_GUEST"], second.environment["PARALLM_GUEST"]) == (LEARNERS, "")
    assert first.environment["PARALLM_MAX_LEARNERS"] == "3" and not first.ends


def test_training_alone_ends_when_it_is_done() -> None:
    first = worker_spec(settings(mode="training_only"), 0)
    assert first.ends and first.environment["PARALLM_END_WITH_GUEST"] == "True"


def test_a_hosted_run_lies_with_its_ring_unless_somebody_says_where(tmp_path: Path) -> None:
    """It lay in the working directory: a ring with new data went on with the run of the one before."""
    made = settings(mode="inference_and_training", data_dir=tmp_path / "data")
    assert worker_spec(made, 0).environment["PARALLM_RUN_DIR"] == str(tmp_path / "data" / "train")
    made.train_config = tmp_path / "run.yaml"
    made.train_config.write_text("run_dir: elsewhere")
    assert "PARALLM_RUN_DIR" not in worker_spec(made, 0).environment


def test_learn_when_starts_night_school_with_answers_stored_and_never_over_tenants() -> None:
    made = settings(learn_when="idle,23:00-07:00", host="0.0.0.0", lora_rank=4, redis="redis://:pa%2Fss@localhost:1")
    made.model_fields_set.discard("feedback_ttl_days")
    check_modes(made)
    assert made.feedback_ttl_days == 14
    child = night_spec(made, 8000, "plm-own")
    assert (child.module, child.environment["PARALLM_CONNECT_TO"]) == ("trainer.night", "127.0.0.1:8000")
    assert child.environment["PARALLM_CONNECT_KEY"] == "plm-own"
    assert child.environment["PARALLM_REDIS_PASSWORD"] == "pa/ss"
    assert child.environment["PARALLM_LORA_RANK"] == "4"
    apart = settings(learn_when="idle", api_key=SecretStr("a-key-of-tenant-a tenant=a"))
    with pytest.raises(SetupError, match="each tenant's own"):
        check_modes(apart)
