"""Facts about the machine, read from texts as macOS and Linux print them."""

import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shared.machine import darwin, linux
from shared.machine.memory import GpuMemory, MachineMemory, footprint, machine_memory, pressure_by, worst
from shared.machine.power import Power, machine_power, power_in
from shared.machine.status import MachineStatus
from shared.machine.system import System, this_system, trouble_with_mlx, version_numbers
from shared.machine.thermal import machine_thermal, thermal_by_level, thermal_by_speed

GIB = 1 << 30

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                     9436.
Pages active:                                 774260.
Pages inactive:                               915780.
Pages speculative:                              1639.
Pages throttled:                                   0.
Pages wired down:                             184732.
Pages purgeable:                               22877.
"Translation faults":                       37287533.
Pages copy-on-write:                         5732353.
Pages zero filled:                          20012345.
Pages reactivated:                               120.
Pages purged:                                      0.
File-backed pages:                           1021174.
Anonymous pages:                              670505.
Pages stored in compressor:                   371034.
Pages occupied by compressor:                 167682.
Decompressions:                                12345.
Compressions:                                 400000.
Pageins:                                      881232.
Pageouts:                                          0.
Swapins:                                           0.
Swapouts:                                          0.
"""

MEMINFO = """\
MemTotal:       16303224 kB
MemFree:         1203712 kB
MemAvailable:    9123456 kB
Active(anon):    4210000 kB
HugePages_Total:       0
"""

STATUS = """\
Name:	python
VmPeak:	 9000000 kB
VmRSS:	 1500000 kB
RssAnon:	 1100000 kB
RssFile:	  390000 kB
RssShmem:	   10000 kB
VmSwap:	    5000 kB
"""


def test_available_memory_of_a_mac_is_what_activity_monitor_does_not_call_used() -> None:
    used = (670505 - 22877 + 184732 + 167682) * 16384
    assert darwin.available_in(VM_STAT, 32 * GIB) == 32 * GIB - used
    assert darwin.available_in("zsh: command not found: vm_stat", 32 * GIB) is None


def test_the_footprint_is_the_eighth_number_after_the_uuid() -> None:
    usage = bytes(16) + struct.pack("=10Q", *range(1, 11))
    assert darwin.footprint_in(usage) == 8


def test_figures_of_proc_are_bytes_by_name() -> None:
    figures = linux.kilobytes_in(MEMINFO)
    assert figures["MemAvailable"] == 9123456 * 1024
    assert figures["Active(anon)"] == 4210000 * 1024
    assert "HugePages_Total" not in figures


def test_a_process_is_charged_for_what_cannot_be_read_again_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text(STATUS)
    assert linux.physical_footprint(7, tmp_path) == 1_115_000 * 1024
    assert linux.physical_footprint(8, tmp_path) is None


def test_stall_shares_are_those_of_ten_seconds() -> None:
    text = "some avg10=22.10 avg60=4.00 avg300=1.02 total=12\nfull avg10=3.50 avg60=0.00 avg300=0.00 total=3\n"
    assert linux.stalls_in(text) == linux.Stalls(22.1, 3.5)
    assert linux.stalls_in("") == linux.Stalls()


@pytest.mark.parametrize(
    ("left", "stalls", "level"),
    [
        (0.5, linux.Stalls(), "normal"),
        (0.09, linux.Stalls(), "warning"),
        (0.03, linux.Stalls(), "critical"),
        (0.5, linux.Stalls(some=25.0), "warning"),
        (0.5, linux.Stalls(some=25.0, full=12.0), "critical"),
    ],
)
def test_pressure_is_by_what_is_left_and_by_how_long_tasks_have_waited(
    left: float, stalls: linux.Stalls, level: str
) -> None:
    assert pressure_by(1000, int(1000 * left), stalls) == level


def test_an_unknown_size_is_no_pressure() -> None:
    assert pressure_by(0, 0) == "normal"
    assert worst("normal", "critical", "warning") == "critical"


def control_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(text)


def test_the_tightest_of_nested_control_groups_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/ring.slice/worker.service\n")
    stat = "anon 100\nactive_file 30\ninactive_file 20\n"
    inner, outer = root / "ring.slice" / "worker.service", root / "ring.slice"
    control_group(inner, memory_max="1000\n", memory_current="500\n", memory_stat=stat)
    control_group(outer, memory_max="1200\n", memory_current="900\n", memory_stat=stat)
    control_group(root, memory_max="max\n", memory_current="5000\n", memory_stat=stat)
    group = linux.tightest_group(proc=proc, root=root)
    assert group is not None
    assert (group.path, group.limit, group.available) == (outer, 1200, 350)


def test_control_groups_of_the_first_version_are_read_too(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n")
    control_group(  # inside a container the path is the host's, and the root is the container's own group
        root / "memory",
        memory_limit_in_bytes="1000\n",
        memory_usage_in_bytes="700\n",
        memory_stat="active_file 1\ntotal_active_file 60\ntotal_inactive_file 40\n",
    )
    group = linux.tightest_group(proc=proc, root=root)
    assert group is not None and (group.limit, group.available) == (1000, 400)


def test_a_group_without_a_limit_is_none(tmp_path: Path) -> None:
    control_group(tmp_path, memory_limit_in_bytes="9223372036854771712\n", memory_usage_in_bytes="7\n")
    assert linux.group_memory(tmp_path) is None
    assert linux.tightest_group(proc=tmp_path, root=tmp_path) is None


@pytest.mark.parametrize(
    ("text", "power"),
    [
        (
            "Now drawing from 'AC Power'\n"
            " -InternalBattery-0 (id=22675555)\t7%; AC attached; not charging present: true\n",
            Power("mains", 7),
        ),
        (
            "Now drawing from 'Battery Power'\n"
            " -InternalBattery-0 (id=22806627)\t100%; discharging; (no estimate) present: true\n",
            Power("battery", 100),
        ),
        ("Now drawing from 'UPS Power'\n -Back-UPS (id=1)\t64%; discharging; 0:20 remaining\n", Power("battery", 64)),
        ("Now drawing from 'AC Power'\n", Power("mains", None)),  # a Mac without a battery
        ("", Power("unknown", None)),
    ],
)
def test_power_source_as_pmset_prints_it(text: str, power: Power) -> None:
    assert power_in(text) == power


def supply(folder: Path, **said: str) -> None:
    folder.mkdir(parents=True)
    for name, text in said.items():
        (folder / name).write_text(text + "\n")


@pytest.mark.skipif(sys.platform == "darwin", reason="reads Linux's power supplies")
def test_power_supplies_of_linux(tmp_path: Path) -> None:
    assert machine_power(tmp_path / "none") == Power("unknown", None)
    supply(tmp_path / "hidpp_battery_0", type="Battery", scope="Device", status="Discharging", capacity="5")
    assert machine_power(tmp_path) == Power("unknown", None)
    supply(tmp_path / "BAT0", type="Battery", status="Discharging", capacity="81")
    assert machine_power(tmp_path) == Power("battery", 81)
    supply(tmp_path / "AC", type="Mains", online="1")
    assert machine_power(tmp_path) == Power("mains", 81)


def test_thermal_level_as_notifyutil_prints_it() -> None:
    key = "com.apple.system.thermalpressurelevel"
    states = [thermal_by_level(f"{key} {level}\n") for level in range(6)]
    assert states == ["nominal", "fair", "serious", "critical", "critical", "unknown"]
    assert thermal_by_level("") == "unknown"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("Note: No thermal warning level has been recorded\nNote: No performance warning level", "nominal"),
        (
            "2026-08-20 05:08:37 -0700 CPU Power notify\n"
            "\tCPU_Scheduler_Limit \t= 80\n\tCPU_Available_CPUs \t= 12\n\tCPU_Speed_Limit \t= 62\n",
            "serious",
        ),
        ("\tCPU_Speed_Limit \t= 100\n", "nominal"),
        ("\tCPU_Speed_Limit \t= 30\n", "critical"),
        ("", "unknown"),
    ],
)
def test_thermal_state_as_pmset_prints_it(text: str, state: str) -> None:
    assert thermal_by_speed(text) == state


def test_versions_compare_by_their_numbers() -> None:
    assert version_numbers("26.10.1") > version_numbers("26.2")
    assert version_numbers("6.18.44-fc") == (6, 18)


def test_a_system_on_which_mlx_does_not_work_is_told_what_to_do() -> None:
    mac = System("darwin", "arm64", "26.1", "Apple M5 Pro", "Mac17,1", is_apple_silicon=True, translated=False)
    assert "needs 26.2 on Apple M5 Pro, and this is 26.1" in trouble_with_mlx(mac)
    assert not trouble_with_mlx(replace(mac, version="26.2"))
    assert not trouble_with_mlx(replace(mac, version="15.7"))
    assert not trouble_with_mlx(replace(mac, chip="Apple M4"))
    assert "Rosetta" in trouble_with_mlx(replace(mac, version="26.2", translated=True))


def test_this_machine_can_be_read() -> None:
    memory, system = machine_memory(), this_system()
    assert 0 < memory.available <= memory.total
    assert footprint() > 1 << 20
    assert footprint(os.getppid()) >= 0
    assert system.platform == sys.platform and system.architecture
    assert machine_power().source in ("mains", "battery", "unknown")
    assert machine_thermal() in ("nominal", "fair", "serious", "critical", "unknown")


def test_a_process_is_pressed_by_its_limit_and_by_its_gpu() -> None:
    calm, limit = MachineMemory(total=100 * GIB, available=60 * GIB), 10 * GIB
    whole = GpuMemory(total=80 * GIB, available=40 * GIB, held=30 * GIB)
    cases = (
        (1, GpuMemory(), limit, "normal"),
        (93 * limit // 100, GpuMemory(), limit, "warning"),
        (limit, GpuMemory(), limit, "critical"),
        (1, whole, limit, "critical"),
        (1, whole, 0, "normal"),
        (1, GpuMemory(total=80 * GIB, available=2 * GIB), 0, "critical"),
    )
    for held, gpu, most, pressure in cases:
        assert MachineStatus.of(calm, held, gpu, most).pressure == pressure
