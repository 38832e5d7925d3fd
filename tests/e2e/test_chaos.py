"""A short run of chaos (tests/e2e/chaos.py); `make chaos MINUTES=30` runs as long as you like."""

import pytest

from tests.e2e import chaos


@pytest.mark.timeout(240)
async def test_nothing_is_lost_and_nothing_changed_while_processes_die() -> None:
    report, faults = await chaos.run(22, seed=11, lease_ms=1500, freeze_s=4, trainer=False)
    chaos.show(report, faults)
    assert report.violations == []
    assert faults.total() >= 5
    assert report.streams > 10 and report.samples > 0
