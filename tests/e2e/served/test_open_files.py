"""Processes may open as many files as the system allows, whatever mlx_lm says."""

import resource
import sys

import psutil
import pytest

from shared.process.open_files import FILES
from tests.e2e.rings import Ring


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells another process's limits")
def test_all_processes_of_a_ring_may_open_as_many_files_as_the_system_allows(served: Ring) -> None:
    ours = resource.getrlimit(resource.RLIMIT_NOFILE)
    (worker,) = served.workers()
    (api,) = (
        each for each in psutil.Process(served.server.popen.pid).children(recursive=True) if "api" in each.cmdline()
    )
    for process in (psutil.Process(worker.pid), api):
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        assert hard == ours[1]
        assert soft == max(ours[0], FILES if hard == resource.RLIM_INFINITY else min(hard, FILES))
