"""KV on disk beside an engine's thread: reads and writes that others do, and disks that hang."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_model.config import DiskConfig, EngineConfig
from shared.sequences import SequenceSpec
from tests.engine.conftest import prompt_of, spec
from tests.engine.test_thread import Outbox
from tests.waiting import HANG_S
from worker.engine.messages import RowRequest
from worker.engine.orders import Submit
from worker.engine.prefixes.disk import tier
from worker.engine.thread import EngineThread


class Served(Outbox):
    """What one engine has said."""

    def __init__(self, engine: Callable[["Served"], EngineThread]) -> None:
        super().__init__()
        self.engine = engine(self)
        self.engine.start()

    def ask(self, *specs: SequenceSpec) -> None:
        self.engine.send(Submit([RowRequest(one) for one in specs]))

    def finish(self, *specs: SequenceSpec) -> None:
        self.ask(*specs)
        for one in specs:
            self.wait(lambda one=one: self.finished(one.id))

    def tokens(self, seq: str) -> list[int]:
        return [token for event in self.events if event.seq == seq for token in event.tokens]

    def until_files(self, count: int) -> None:
        """So many are known; the figure is of the latest turn."""
        deadline = time.monotonic() + HANG_S
        while self.engine.stats().disk.files < count:
            assert time.monotonic() < deadline, "the files were not found"
            self.finish(spec(f"turn{time.monotonic_ns()}", prompt_of(5), max_tokens=1))

    def cached(self, seq: str) -> int:
        return next(event.finish.cached_tokens for event in self.events if event.seq == seq and event.finish)


@contextmanager
def served(model: Path, folder: Path, *, rows: int = 4, **disk: object) -> Iterator[Served]:
    config = EngineConfig(
        str(model), max_rows=rows, block_size=16, disk=replace(DiskConfig(str(folder), flush_interval_s=0.01), **disk)
    )
    ring = Served(lambda out: EngineThread(config, out.on_step, out.on_death))
    yield ring
    assert ring.engine.stop(), "its threads end"
    assert ring.death is None


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


def test_many_files_come_back_in_order_while_others_decode(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "ARRAY_BYTES", 1)  # one block a file
    one = spec("one", prompt_of(300))
    with served(llama_folder, tmp_path) as before:
        before.finish(one)
        cold = before.tokens("one")
    assert len(files(tmp_path)) == 19
    with served(llama_folder, tmp_path) as after:
        after.until_files(19)
        after.ask(spec("busy", prompt_of(10), max_tokens=400))
        after.finish(one)
        assert after.tokens("one") == cold
        assert after.cached("one") == 299 // 16 * 16
        assert not after.finished("busy")


def test_a_row_starts_with_what_it_has_when_the_disk_hangs(
    llama_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = spec("one", prompt_of(150)), spec("other", prompt_of(150, 1))
    with served(llama_folder, tmp_path) as before:
        before.finish(one, other)
    with served(llama_folder, tmp_path) as after:
        after.until_files(2)
        for path in files(tmp_path):
            path.unlink()
            os.mkfifo(path)  # who opens it to read waits for ever
        after.finish(one)
        assert after.cached("one") == 0 and after.tokens("one") == before.tokens("one")
        after.finish(other)  # nobody waits again
        assert after.tokens("other") == before.tokens("other")
        assert [record.message.split()[0] for record in caplog.records] == ["kv.disk_is_slow"]
        for path in files(tmp_path):
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # let them go


def test_workers_that_share_a_folder_find_each_others_files(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "LOOK_EVERY_S", 0.01)
    one = spec("one", prompt_of(150))
    with served(llama_folder, tmp_path, write_through=True) as here, served(llama_folder, tmp_path) as there:
        here.finish(one)
        here.until_files(1)
        there.until_files(1)
        there.finish(one)
        assert there.tokens("one") == here.tokens("one")
        assert there.cached("one") == 144
