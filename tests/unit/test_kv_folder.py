"""A folder of files that several processes share: within its bound at any time, and nothing half written is found."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import HANG_S
from worker.engine.prefixes.disk.folder import FILE, LOCK, PART, Folder

ROOT = Path(__file__).parents[2]
WRITER = """
import sys
from pathlib import Path
from worker.engine.prefixes.disk.folder import Folder
root, seed, size, count, bound = Path(sys.argv[1]), *map(int, sys.argv[2:])
folder = Folder(root, "base", "a" * 32, max_bytes=bound, ttl_s=0, durable=False)
folder.open(parents=True)
print("begun", flush=True)
for number in range(count):
    name = f"{seed * 1_000_000 + number:032x}"
    assert folder.write(name, [name.encode(), bytes(size + 1000 * (number % 7) - len(name))])
"""


def folder_of(root: Path, *, base: str = "base", identity: str = "a" * 32, bound: int = 0, ttl_s: float = 0) -> Folder:
    folder = Folder(root, base, identity, max_bytes=bound, ttl_s=ttl_s, durable=True)
    folder.open(parents=True)
    return folder


def name(number: int) -> str:
    return f"{number:032x}"


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def total(root: Path) -> int:
    sizes = 0
    for path in files(root):
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes


def writer(root: Path, seed: int, size: int, count: int, bound: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), *map(str, (seed, size, count, bound))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "begun\n"
    return process


def test_what_was_written_is_read_by_another(tmp_path: Path) -> None:
    one, other = folder_of(tmp_path), folder_of(tmp_path)
    assert one.write(name(1), [b"abc", memoryview(b"defg")]) == 7
    one.sync()
    assert other.sizes() == {name(1): 7}
    assert bytes(other.read(name(1))) == b"abcdefg"
    assert other.write(name(1), [b"abc", b"defg"]) == 7, "it is there"
    assert one.bytes == total(tmp_path)
    other.remove([name(1), name(2)])
    assert one.sizes() == {} and other.bytes == total(tmp_path)


def test_what_was_used_least_lately_goes_first(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, bound=10_000)
    for number in range(9):
        folder.write(name(number), [bytes(1000)])
        path = tmp_path.joinpath(*next(tmp_path.glob(f"*/{name(number)}*")).relative_to(tmp_path).parts)
        os.utime(path, (number, number))
    folder.read(name(0))
    folder.write(name(9), [bytes(1000)])
    assert name(0) in folder.sizes() and name(9) in folder.sizes()
    assert name(1) not in folder.sizes() and total(tmp_path) <= 10_000
    assert folder.evicted == 9 + 1 - len(folder.sizes())
    assert folder.write(name(10), [bytes(10_001)]) == 0, "it will never fit, and drives nothing out"
    assert len(folder.sizes()) == 10 - folder.evicted


def test_files_that_nobody_has_used_go(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ttl_s=1000)
    for number in (1, 2):
        folder.write(name(number), [bytes(10)])
    old = time.time() - 1001
    os.utime(next(tmp_path.glob(f"*/{name(1)}*")), (old, old))
    folder.expire()
    assert (list(folder.sizes()), folder.evicted, folder.bytes) == ([name(2)], 1, total(tmp_path))


def test_another_release_of_the_same_model_clears_up_and_other_models_stay(tmp_path: Path) -> None:
    before, other = folder_of(tmp_path, identity="b" * 32), folder_of(tmp_path, base="other")
    for folder in (before, other):
        folder.write(name(1), [bytes(10)])
    folder_of(tmp_path)
    assert before.sizes(), "a worker that lives uses them"
    before.close()
    now = folder_of(tmp_path)
    with pytest.raises(FileNotFoundError):
        before.sizes()
    assert other.sizes() and now.bytes == total(tmp_path)


def test_others_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    theirs = [tmp_path / "weights" / "model.safetensors", tmp_path / "notes.txt"]
    for path in theirs:
        path.write_bytes(bytes(5000))
    folder = folder_of(tmp_path, bound=3000, ttl_s=1)
    for number in range(5):
        folder.write(name(number), [bytes(1000)])
    folder.expire()
    assert all(path.exists() for path in theirs)
    assert folder.sizes()


@pytest.mark.parametrize("said", [b"", b"junk", b"-0000000000000000001"])
def test_a_count_that_cannot_be_read_is_made_anew(tmp_path: Path, said: bytes) -> None:
    folder = folder_of(tmp_path, bound=3000)
    folder.write(name(1), [bytes(1000)])
    (tmp_path / LOCK).write_bytes(said)
    folder.write(name(2), [bytes(1000)])
    assert folder.bytes == total(tmp_path)


def test_a_folder_has_an_id_that_all_who_share_it_know(tmp_path: Path) -> None:
    ours, theirs = folder_of(tmp_path / "one"), folder_of(tmp_path / "one", base="another model")
    assert ours.id == theirs.id != folder_of(tmp_path / "two").id
    before = ours.id
    shutil.rmtree(tmp_path / "one")
    theirs = folder_of(tmp_path / "one", base="another model")
    ours.expire()
    assert ours.id == theirs.id != before, "removed and made again, it is another folder"
    assert ours.bytes == total(tmp_path / "one")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        with pytest.raises(OSError, match="too large"):
            folder.write(name(1), [bytes(2 << 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert not folder.sizes() and not list(tmp_path.glob(f"*/*{PART}"))
    assert folder.bytes == total(tmp_path)


def test_a_process_killed_while_it_writes_leaves_whole_files_and_a_true_count(tmp_path: Path) -> None:
    process = writer(tmp_path, 1, 4 << 20, 10_000, 200 << 20)
    deadline = time.monotonic() + HANG_S
    while not list(tmp_path.glob(f"*/*{PART}")) or len(list(tmp_path.glob(f"*/*{FILE}"))) < 3:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = folder_of(tmp_path, bound=200 << 20)
    assert not list(tmp_path.glob(f"*/*{PART}"))
    assert folder.bytes == total(tmp_path)
    for number, size in folder.sizes().items():
        assert folder.read(number).startswith(number.encode())
        assert size >= 4 << 20


def test_two_processes_never_pass_the_bound_together(tmp_path: Path) -> None:
    bound = 600_000
    folder = folder_of(tmp_path, bound=bound)
    processes = [writer(tmp_path, seed, 40_000, 200, bound) for seed in (1, 2)]
    seen = []
    while any(process.poll() is None for process in processes):
        with folder._locked():  # else a file that moves on may be seen twice
            seen.append(total(tmp_path))
    assert [process.returncode for process in processes] == [0, 0]
    assert bound / 2 < max(seen) <= bound
    folder.expire()
    assert 0 < folder.bytes == total(tmp_path) <= bound


def test_a_folder_that_has_gone_is_an_error_until_it_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    folder = folder_of(root)
    folder.write(name(1), [bytes(10)])
    for path in files(root):
        path.unlink()
    for place in (*(path for path in root.iterdir()), root):
        place.rmdir()
    for call in (folder.sizes, folder.expire, lambda: folder.write(name(2), [bytes(10)])):
        with pytest.raises(FileNotFoundError):
            call()
    folder.open()
    assert folder.write(name(2), [bytes(10)]) == 10 and folder.bytes == total(root)
