from collections.abc import Generator, Iterator

import pytest

from tests.e2e.rings import Process, Ring, ring

LAST_LINES = 60


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """One worker, one api, one job runner, for the tests of a module that leave the processes alone."""
    with ring(tmp_path_factory.mktemp("ring")) as started:
        yield started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the processes of a failed test said last."""
    report = yield
    if report.failed:
        for name, value in item.funcargs.items():
            process = value.server if isinstance(value, Ring) else value
            if isinstance(process, Process):
                report.sections.append((f"last lines of {name}", "".join(process.lines[-LAST_LINES:])))
    return report
