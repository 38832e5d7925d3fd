"""Takes memory of a control group until little is left, says so, and holds it until its standard input ends."""

import sys
from pathlib import Path

from shared.machine.linux import group_memory

STEP = 2 << 20

if __name__ == "__main__":
    folder, left = Path(sys.argv[1]), float(sys.argv[2])
    blocks: list[bytearray] = []
    while (group := group_memory(folder)) is not None and group.available > left * group.limit:
        blocks.append(bytearray(b"\1") * STEP)
    print("taken", len(blocks) * STEP, flush=True)
    sys.stdin.read()
