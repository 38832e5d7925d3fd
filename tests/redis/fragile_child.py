"""A child process that dies as its folder says: `python -m tests.redis.fragile_child`, started by a supervisor.

The first line of the file `codes` is the exit code of this start, and is taken out; with no line left it stays until
its parent leaves.
"""

import os
import sys
from pathlib import Path

codes = Path(os.environ["FRAGILE_CODES"])
now, *later = codes.read_text().split() or [""]
codes.write_text("\n".join(later))
if now:
    sys.exit(int(now))
sys.stdin.read()
