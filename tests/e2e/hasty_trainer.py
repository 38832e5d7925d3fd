"""A real trainer that gives the policy's present owner one second to end, and not the 15 of `trainer.ring.board`.

`python -m tests.e2e.hasty_trainer ARGUMENTS OF mlx_parallm_train`.
"""

import sys

from trainer import __main__ as command
from trainer.ring import board

board.WAIT_FOR_OWNER_S = 1.0

if __name__ == "__main__":
    sys.exit(command.main())
