"""The program that keeps a Mac awake: how it is started, and where it is not."""

import os
import sys
from pathlib import Path

import pytest

from shared.machine.awake import stay_awake
from tests.waiting import wait_until


async def test_caffeinate_watches_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "caffeinate"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/began.part\nmv {tmp_path}/began.part {tmp_path}/began\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert stay_awake(program=str(program))
    await wait_until((tmp_path / "began").exists)
    assert (tmp_path / "began").read_text() == f"-i -w {os.getpid()}\n"


def test_it_is_left_out_elsewhere_and_on_request_and_its_absence_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert not stay_awake()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not stay_awake(wanted=False, program="/bin/sh")
    assert not stay_awake(program="/nowhere/caffeinate")
