"""`python -m trainer.merging`: what `mlx_parallm adapters merge` starts, since a client's commands load no MLX."""

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from shared.errors import ParallmError


def main() -> int:
    """The process's exit code: 0 merged, 1 refused, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m trainer.merging", description=__doc__)
    parser.add_argument("base", help="a folder or a hub name")
    parser.add_argument("adapter", type=Path, help="a folder")
    parser.add_argument("target", type=Path, help="a folder that is not there yet")
    parser.add_argument("--name", default="the adapter", help="of the adapter, for people")
    parser.add_argument("--base-sha256", default="", help="of the base that the adapter was made for")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        from trainer.merging.merge import HEADS, Merging, merge  # loads mlx, which takes a second

        asked = Merging(
            given.base,
            given.adapter,
            given.target,
            given.name,
            given.base_sha256,
            dequantize=given.dequantize,
            trust_remote_code=given.trust_remote_code,
        )
        heads = merge(asked)
    except (ParallmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing has been written", file=sys.stderr)
        return 130
    print(f"{given.name} merged into {given.base}: {given.target}")
    if heads:
        print(f"its heads ({', '.join(heads)}) are in {given.target / HEADS}, to be uploaded for the merged model")
    return 0


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
