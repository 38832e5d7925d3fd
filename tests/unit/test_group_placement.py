"""Which rank of which group a process is."""

import json
from pathlib import Path
from typing import Any

import pytest

from ranks.placement import Placement, address_of, own_device, own_names, placement
from shared.errors import SetupError
from shared.process.serve_settings import ServeSettings
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from trainer.learners import placing
from trainer.learners.ranks import RankLearner
from trainer.settings import TrainSettings
from worker.guest import rank_of_guest


def placed(line: str = "", **environment: str) -> Placement | None:
    return placement(load(WorkerSettings, line.split()), environment)


def hostfile(folder: Path, content: Any) -> str:
    path = folder / "hosts.json"
    path.write_text(json.dumps(content))
    return str(path)


def machines(*addresses: str) -> list[dict[str, object]]:
    return [{"ssh": f"mac{at}", "ips": [address]} for at, address in enumerate(addresses)]


def test_a_worker_is_no_group_unless_it_is_told() -> None:
    assert placed() is None
    assert placed("--distributed-mode off") is None
    assert placed("--distributed-mode=off", MLX_RANK="0", MLX_HOSTFILE="/nowhere") is None


def test_ranks_of_one_machine_find_one_another_by_a_name_of_their_own() -> None:
    one, other = placed("--num-local-ranks 2"), placed("--num-local-ranks 2")
    assert one is not None and other is not None
    assert (one.rank, one.size, one.is_local) == (0, 2, True)
    assert one.group != other.group, "two groups of one machine are two"
    second = placed(f"--num-local-ranks 2 --distributed-rank 1 --distributed-group {one.group}")
    assert second is not None and (second.group, second.rank) == (one.group, 1)


def test_a_machine_finds_its_rank_in_the_file(tmp_path: Path) -> None:
    ours = next(name for name in own_names() if name.count(".") != 1)
    file = hostfile(tmp_path, machines("192.0.2.7", ours, "192.0.2.9"))
    found = placed(f"--distributed-hostfile {file}")
    assert found is not None and (found.rank, found.size, found.is_local) == (1, 3, False)
    other = placed(f"--distributed-hostfile {file} --distributed-rank 2")
    assert other is not None and (other.rank, other.group) == (2, found.group), "one group on all machines"
    third = placed(f"--distributed-hostfile {file} --served-model-name another")
    assert third is not None and third.group != found.group


def test_under_mlx_launch(tmp_path: Path) -> None:
    ring = hostfile(tmp_path, [["127.0.0.1:5000"], ["127.0.0.1:5001"]])
    found = placed(MLX_RANK="1", MLX_HOSTFILE=ring)
    assert found is not None and (found.rank, found.size, found.hosts[1].addresses) == (1, 2, ("127.0.0.1:5001",))
    trains = placing.placement(load(TrainSettings, []), {"MLX_RANK": "1", "MLX_HOSTFILE": ring})
    assert trains is not None and (trains.kind, trains.rank, trains.size) == ("trainer", 1, 2)
    gpus = placed(MLX_RANK="1", MLX_WORLD_SIZE="4", NCCL_HOST_IP="10.0.0.1", NCCL_PORT="12345")
    assert gpus is not None and (gpus.rank, gpus.size, gpus.backend) == (1, 4, "nccl")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--distributed-mode ring", "needs ranks: --num-local-ranks"),
        ("--distributed-mode off --num-local-ranks 2", "contradicts --num-local-ranks"),
        ("--distributed-mode jaccl --num-local-ranks 2", "for several machines"),
        ("--distributed-sharding pipeline", "--distributed-sharding pipeline needs ranks: --num-local-ranks"),
        (
            "--num-local-ranks 2 --distributed-sharding pipeline --guest trainer.hosted:HostedTrainer",
            "--guest with --distributed-sharding pipeline cannot be had",
        ),
        ("--num-local-ranks 2 --distributed-sharding data", "--distributed-sharding data cannot be had by a worker"),
        ("--num-local-ranks 2 --spec-decode auto", "--spec-decode auto cannot be had"),
        ("--num-local-ranks 2 --ssd-cache-dir kv", "--ssd-cache-dir cannot be had"),
        ("--num-local-ranks 2 --kv-transfer", "--kv-transfer cannot be had"),
        ("--num-local-ranks 2 --distributed-rank 1", "leave --distributed-rank out"),
        ("--num-local-ranks 2 --distributed-hostfile x.json", "leave one out"),
        ("--distributed-hostfile /no/such.json", "No such file"),
    ],
)
def test_what_cannot_be_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        placed(line)


def test_a_trainer_is_a_group_of_its_own(tmp_path: Path) -> None:
    ours = next(name for name in own_names() if name.count(".") != 1)
    file = hostfile(tmp_path, machines(ours, "192.0.2.9"))
    line = f"--distributed-hostfile {file} --model m"

    def of(run: str) -> Placement:
        found = placing.placement(load(TrainSettings, [*line.split(), "--run", run]), {})
        assert found is not None
        return found

    worker = placed(f"{line} --served-model-name one")
    assert worker is not None and of("one").kind == "trainer"
    assert len({worker.group, of("one").group, of("two").group}) == 3, "ranks of one are not taken for another's"
    assert placing.placement(load(TrainSettings, []), {}) is None


@pytest.mark.parametrize(
    "flag",
    [
        "--mode ppo", "--lora-kind dora", "--learner shared",
        "--learner service", "--federation team", "--distributed-sharding pipeline", "--over-http",
    ],
)  # fmt: skip
def test_what_ranks_do_not_learn_is_refused_by_name(flag: str) -> None:
    with pytest.raises(SetupError, match=f"{flag.removesuffix(' team')} cannot be had by a trainer of several ranks: "):
        placing.placement(load(TrainSettings, [*flag.split(), "--num-local-ranks", "2"]), {})


def test_ranks_that_each_have_the_model_learn_dora_and_values_and_no_heads_of_data_sets() -> None:
    line = ["--num-local-ranks", "2", "--distributed-sharding", "data"]
    for flag in ("--lora-kind dora", "--loss ppo"):
        assert placing.placement(load(TrainSettings, [*line, *flag.split()]), {}) is not None
    with pytest.raises(SetupError, match="--mode reward cannot be had with --distributed-sharding data: "):
        placing.placement(load(TrainSettings, [*line, "--mode", "reward"]), {})


@pytest.mark.parametrize(
    "line",
    [
        "--mode rl", "--loss ppo", "--mode reward --dataset d.jsonl --connect-to a:1",
        "--head-only --mode reward --dataset d.jsonl --connect-to a:1",
        "--mode sft --dataset d.jsonl", "--mode dpo --dataset d.jsonl",
        "--mode distill --dataset d.jsonl --teacher t@1 --connect-to a:1",
    ],
)  # fmt: skip
def test_what_ranks_learn_is_taken(line: str) -> None:
    settings = load(TrainSettings, [*line.split(), "--num-local-ranks", "2", "--distributed-mode", "ring"])
    settings.check()
    found = placing.placement(settings, {})
    assert found is not None and (found.kind, found.size, found.backend) == ("trainer", 2, "ring")


def test_the_other_ranks_of_a_trainer_get_its_settings_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["--num-local-ranks", "2", "--reward-options", '{"a": [1, "b"]}', "--stop", "x", "--stop", "y z"]
    settings = load(TrainSettings, [*line, "--lora-targets", "q_proj", "--dataset", "data.jsonl", "--logger", "wandb"])
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert load(TrainSettings, []).model_dump() == settings.model_dump()


def test_a_guest_that_knows_of_one_process_alone_is_refused_by_several(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(WorkerSettings, ["--num-local-ranks", "2", "--guest", "tests.training.nobody:Nobody"])
    monkeypatch.setattr("tests.training.nobody.Nobody", object, raising=False)
    with pytest.raises(
        SetupError, match=r"--guest tests\.training\.nobody:Nobody cannot be had by a worker of several"
    ):
        rank_of_guest(settings)
    trains = load(WorkerSettings, ["--num-local-ranks", "2", "--guest", "trainer.hosted:HostedTrainer"])
    assert rank_of_guest(trains) is RankLearner and rank_of_guest(load(WorkerSettings, [])) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"ssh": "one"}], "names 1 machines"),
        ({"hosts": 7}, "a list of machines"),
        ([["a:1"], [5]], "a list of machines"),
        (machines("192.0.2.7", "192.0.2.8"), "none of its ranks is this machine"),
    ],
)
def test_a_file_that_names_no_group_is_refused(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=said):
        placed(f"--distributed-hostfile {hostfile(tmp_path, content)}")


def test_serve_takes_the_same_flags() -> None:
    settings = load(ServeSettings, ["--num-local-ranks", "2", "--distributed-strict", "--distributed-mode", "ring"])
    assert settings.of(WorkerSettings).num_local_ranks == 2 and settings.distributed_strict
    assert not load(ServeSettings, ["--no-distributed-strict"]).distributed_strict


def test_each_rank_of_a_machine_has_a_device_of_its_own() -> None:
    def device(rank: int, visible: str) -> str:
        return own_device(Placement("g", rank, 2, "nccl", True), visible)

    assert [device(rank, "") for rank in (0, 1)] == ["0", "1"]
    assert [device(rank, "2,3") for rank in (0, 1)] == ["2", "3"]


def test_addresses_with_and_without_a_port() -> None:
    assert [address_of(each) for each in ("10.0.0.1", "10.0.0.1:5", "fd00::1", "[fd00::1]:5")] == [
        "10.0.0.1", "10.0.0.1", "fd00::1", "fd00::1",
    ]  # fmt: skip
