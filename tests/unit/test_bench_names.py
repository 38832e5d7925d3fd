"""`python -m tests.bench`: its command line."""

from importlib.util import find_spec

import pytest

from tests.bench.__main__ import MEASUREMENTS, main


def test_a_measurement_that_there_is_not_is_named_beside_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["frames", "framse"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "framse" in said.err and "frames" in said.err and not said.out


def test_help_lists_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name, meaning in MEASUREMENTS.items():
        assert f"  {name} " in said and meaning in said
        assert find_spec(f"tests.bench.{name}") is not None
