"""The experts that samples were drawn with, laid out for a forward that replays them (mlx_model/routing.py).

The routes of completion token t are those of the position that was fed to draw it: of the prompt's last one for the
first token, else of the token before it. What came before, the rest of the prompt and what a tool said, is unknown, and
the trainer's own router chooses there. Shapes: B rows, T completion positions, P prompts, S prompt positions, L
positions of rows that hold prompt and completion, N bytes of a token's routes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_model.routing import UNKNOWN, Replay

Routes = npt.NDArray[np.uint8]


def padded_routes(routes: Sequence[bytes], lengths: Sequence[int], width: int) -> Routes | None:
    """Routes [B, T, N] of completions of these lengths; None where there are none. ValueError when they do not fit."""
    each = {len(given) / max(1, length) for given, length in zip(routes, lengths, strict=True) if given}
    if not each:
        return None
    nbytes = int(max(each))
    if each != {nbytes}:
        raise ValueError(f"samples name their experts in different numbers of bytes a token: {sorted(each)}")
    routes_BTN = np.full((len(routes), width, nbytes), UNKNOWN, np.uint8)
    for row, (given, length) in enumerate(zip(routes, lengths, strict=True)):
        if given:
            routes_BTN[row, :length] = np.frombuffer(given, np.uint8).reshape(length, nbytes)
    return routes_BTN


def of_prompts(replay: Replay | None, routes_BTN: Routes | None, prompt_of_B: mx.array, length: int) -> mx.array | None:
    """Routes [P, S, W] of a forward of prompts, of which the last position is known, by each prompt's first row."""
    if replay is None or routes_BTN is None:
        return None
    prompts, firsts = np.unique(np.array(prompt_of_B), return_index=True)
    routes_PSN = np.full((int(prompts.max()) + 1, length, routes_BTN.shape[2]), UNKNOWN, np.uint8)
    routes_PSN[prompts, -1] = routes_BTN[firsts, 0]
    return replay.read(routes_PSN)


def of_rest(replay: Replay | None, routes_BTN: Routes | None) -> mx.array | None:
    """Routes [B, T - 1, W] of a forward of completions without their last tokens."""
    return None if replay is None or routes_BTN is None else replay.read(routes_BTN[:, 1:])


def of_rows(replay: Replay | None, routes_BTN: Routes | None, start_B: mx.array, length: int) -> mx.array | None:
    """Routes [B, L, W] of rows whose completions begin at `start_B`."""
    if replay is None or routes_BTN is None:
        return None
    rows, width, nbytes = routes_BTN.shape
    routes_BLN = np.full((rows, length, nbytes), UNKNOWN, np.uint8)
    for row, start in enumerate(np.array(start_B).tolist()):
        part_TN = routes_BTN[row, : length - start + 1]
        routes_BLN[row, start - 1 : start - 1 + min(width, len(part_TN))] = part_TN
    return replay.read(routes_BLN)


def replaying(replay: Replay | None, routes_BLW: mx.array | None) -> AbstractContextManager[None]:
    """One forward of a model with these routes, or with its routers' own choice."""
    return nullcontext() if replay is None else replay.of(routes_BLW)


def replay_of(module: Any) -> Replay | None:
    """The replay of a model or of one of its layers; None if its routers choose by themselves."""
    replay: Replay | None = getattr(module, "routes_replay", None)
    return replay
