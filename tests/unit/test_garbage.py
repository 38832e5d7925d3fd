"""Full garbage collections of a process that is ready."""

import subprocess
import sys

LOADED = """
import gc
kept = [[] for _ in range(100_000)]
from shared.process.garbage import leave_out_what_is_loaded
leave_out_what_is_loaded()
later = [[] for _ in range(1_000)]
print(len(gc.get_objects()))
cycle = []; cycle.append(cycle); del cycle
print(gc.collect())
"""


def test_they_leave_out_what_was_loaded_and_find_what_came_later() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    looked_at, found = map(int, done.stdout.split())
    assert 1_000 <= looked_at < 50_000
    assert found >= 1


IMPORTED = """
import gc
from shared.process.garbage import no_collections
with no_collections():
    assert not gc.isenabled()
    kept = [[] for _ in range(100_000)]
assert gc.isenabled()
later = [[] for _ in range(1_000)]
print(len(gc.get_objects()))
"""


def test_they_leave_out_what_a_process_has_imported() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert 1_000 <= int(done.stdout) < 50_000
