"""`mlx_parallm doctor`: what its checks make of what a system says."""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from api.doctor.machine import architecture_check, macos_check, memory_check, mlx_check, power_check, sleep_check
from api.doctor.model import files_check, model_checks
from api.doctor.network import firewall_check, port_check, redis_check
from shared.machine.memory import LEVELS, MachineMemory
from shared.machine.power import Power
from shared.machine.system import System
from tests.e2e.rings import ROOT
from tests.waiting import HANG_S

MAC = System("darwin", "arm64", "26.2", "Apple M5", "Mac17,2", is_apple_silicon=True, translated=False)
WHEEL = "cp313-cp313-macosx_26_0_arm64"


def test_a_python_under_rosetta_is_told_from_an_intel_mac() -> None:
    assert architecture_check(MAC).status == "ok"
    translated = architecture_check(replace(MAC, architecture="x86_64", translated=True))
    assert translated.status == "wrong" and "Rosetta" in translated.found and "new environment" in translated.do
    intel = architecture_check(replace(MAC, architecture="x86_64", is_apple_silicon=False))
    assert intel.status == "wrong" and "Intel" in intel.found and "Rosetta" not in intel.found


@pytest.mark.parametrize(
    ("version", "tag", "status"),
    [
        ("26.2", WHEEL, "ok"),
        ("26.1", WHEEL, "wrong"),
        ("26.1", "cp313-cp313-macosx_15_0_arm64", "ok"),
        ("13.7", "", "wrong"),
    ],
)
def test_a_macos_that_the_wheel_does_not_run_on_is_wrong(version: str, tag: str, status: str) -> None:
    assert macos_check(replace(MAC, version=version), tag).status == status


def test_a_mac_without_metal_is_wrong() -> None:
    assert mlx_check(MAC, {"mlx": "0.32.4", "backend": "metal"}).status == "ok"
    assert mlx_check(MAC, {"mlx": "0.32.4", "backend": "cpu"}).status == "wrong"
    assert mlx_check(MAC, None).status == "wrong"


def test_a_mac_that_sleeps_or_is_on_battery_is_noted() -> None:
    assert sleep_check(" standby   1\n sleep                10 (sleep prevented by caffeinate)\n").status == "note"
    assert sleep_check(" displaysleep 10\n sleep                0\n").status == "ok"
    assert sleep_check("").status == "note"
    assert power_check(Power("battery", 80)).status == "note"


def test_pressure_is_noted_and_then_wrong() -> None:
    found = [memory_check(MachineMemory(16 << 30, 1 << 30, level)).status for level in LEVELS]
    assert found == ["ok", "note", "wrong"]


def test_a_firewall_is_noted() -> None:
    assert firewall_check("Firewall is enabled. (State = 1)").status == "note"
    assert firewall_check("Firewall is disabled. (State = 0)").status == "ok"
    assert firewall_check("").status == "note"


def test_a_port_in_use_and_an_address_of_another_machine_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert port_check("127.0.0.1", server.getsockname()[1]).status == "note"
    assert port_check("192.0.2.1", 8000).status == "wrong"


def test_a_redis_without_a_route_is_wrong_and_names_the_local_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}"
    assert redis_check(MAC, url).status == "wrong"

    async def refused(url: str, within_s: float) -> None:
        raise OSError(65, "No route to host")

    monkeypatch.setattr("api.doctor.network.require", refused)
    assert "Local Network" in redis_check(MAC, url).do
    assert "Local Network" not in redis_check(replace(MAC, version="14.7"), url).do


def test_a_folder_that_is_no_whole_model_is_wrong(tmp_path: Path) -> None:
    for name in ("no-such-folder", str(tmp_path)):
        (found,) = model_checks(name, None)
        assert (found.check, found.status) == ("model", "wrong") and found.do
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8)
    assert files_check(tmp_path).status == "wrong"


def test_the_command_prints_its_findings_as_json_and_ends_by_what_is_wrong() -> None:
    for model, code in (("models/tiny", 0), ("./no-such-model", 1)):
        command = [sys.executable, "-m", "api.cli.main", "doctor", "--model", model, "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
        told = json.loads(done.stdout)
        assert (done.returncode, told["ok"]) == (code, code == 0), done.stderr
        assert {"python", "mlx", "memory", "port", "redis", "model"} <= {each["check"] for each in told["findings"]}
