"""A short run of chaos (tests/e2e/chaos.py); `make chaos MINUTES=30` runs as long as you like."""

from tests.e2e import chaos


async def test_nothing_is_lost_and_nothing_changed_while_processes_die() -> None:
    report, faults = await chaos.run(0, seed=11, lease_ms=1000, freeze_s=2, trainer=False, once=True)
    chaos.show(report, faults)
    assert report.violations == []
    assert set(faults) == {
        kind for kind in chaos.WEIGHTS if not kind.startswith(("trainer", "rank", "learners", "seer", "disk", "peers"))
    }
    assert report.streams >= 4 and report.samples > 0
    assert report.resumed > 0, "the killed api had a stream"
