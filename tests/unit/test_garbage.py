"""Full garbage collections of a process that is ready."""

import gc
import subprocess
import sys

from shared.frames import Frame, TokenEvent, TokenLogprob, decode_frame, encode_frame

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


def test_what_is_told_of_a_long_answers_tokens_is_not_looked_through() -> None:
    tops = [(TokenLogprob(token, -0.5), TokenLogprob(token + 1, -1.5)) for token in range(3)]
    event = TokenEvent("a", 1, 0, [0, 1, 2], [-0.5] * 3, tops)
    (read,) = decode_frame(encode_frame(Frame("w", 0, [event]))).events
    gc.collect()
    assert read.top_logprobs == tops and not any(map(gc.is_tracked, read.top_logprobs))
