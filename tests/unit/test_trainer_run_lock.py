"""Two trainers never write one run's folder; one that was killed leaves no lock behind."""

import asyncio
import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import SafetensorError

from shared.errors import SetupError
from trainer.versions.disk import Disk
from trainer.versions.run_lock import run_lock

HOLDER = """
import asyncio, sys
from pathlib import Path
from trainer.versions.run_lock import run_lock
async def hold():
    async with run_lock(Path(sys.argv[1])):
        print("held", flush=True)
        await asyncio.sleep(600)
asyncio.run(hold())
"""


@pytest.fixture
def first(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that holds `runs/policy`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "runs" / "policy")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


async def test_a_second_trainer_is_refused_until_the_first_is_gone(
    tmp_path: Path, first: "subprocess.Popen[bytes]"
) -> None:
    folder = tmp_path / "runs" / "policy"
    with pytest.raises(SetupError, match=rf"another trainer \(process {first.pid}\) has the run's folder .*--run"):
        async with run_lock(folder, wait_s=0):
            pass
    async with run_lock(folder.with_name("other"), wait_s=0):
        pass
    first.kill()
    async with run_lock(folder, wait_s=30):
        folder.rename(folder.with_name("policy.1"))  # a run that begins anew
        with pytest.raises(SetupError, match="another trainer"):
            async with run_lock(folder, wait_s=0):
                pass


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"cannot write the run's files in .*--run-dir"):
        async with run_lock(tmp_path / "file" / "policy"):
            pass


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EROFS, "Read-only file system"), False),
        (SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)"), False),
        (SafetensorError("Error while serializing: I/O error: File too large (os error 27)"), False),
    ],
)
async def test_no_room_is_waited_for_and_no_permission_is_told(tmp_path: Path, error: Exception, kept: bool) -> None:
    told: list[str] = []

    async def alert(kind: str, message: str) -> None:
        told.append(message)

    failures = [error, error]

    async def work() -> str:
        if failures:
            raise failures.pop()
        return "written"

    disk = Disk(tmp_path, alert, asyncio.Event(), look_s=0.0)
    if kept:
        assert await disk.write(work) == "written" and len(told) == 1
    else:
        with pytest.raises(SetupError, match="cannot write the run's files"):
            await disk.write(work)


async def test_other_errors_of_the_system_pass_through(tmp_path: Path) -> None:
    async def alert(kind: str, message: str) -> None:
        raise AssertionError(message)

    async def work() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    with pytest.raises(ConnectionResetError):
        await Disk(tmp_path, alert, asyncio.Event()).write(work)


async def test_a_policy_whose_folder_is_anothers_but_for_capitals_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "Policy").symlink_to("policy")  # as a disk shows it that does not tell them apart
    with pytest.raises(SetupError, match="ignores the case of letters"):
        async with run_lock(tmp_path / "Policy"):
            pass


async def test_folders_that_differ_by_capitals_are_two_where_the_disk_says_so(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    async with run_lock(tmp_path / "Policy"):
        assert (tmp_path / "Policy").is_dir()
