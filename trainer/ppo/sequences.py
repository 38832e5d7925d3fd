"""What was played, cut into sequences to learn from. Shape suffixes as in acting.py and losses.py; B = C N."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.ppo.acting import Floats, Rollout
from trainer.ppo.losses import Steps


def steps_of(rollout: Rollout, advantages_TN: Floats) -> Steps:
    """One after another the sequences of all copies that begin at the same step, each with the state that it had then.

    An episode that begins inside of a sequence begins with zeros there; nothing that was seen before reaches it.
    """
    begins_TN = np.concatenate([np.zeros_like(rollout.ended_TN[:1]), rollout.ended_TN[:-1]])

    def cut(each_TN: npt.NDArray[Any]) -> npt.NDArray[Any]:
        sequences = len(rollout.states_C)
        each_CLN = each_TN.reshape(sequences, -1, *each_TN.shape[1:])
        each_BL: npt.NDArray[Any] = each_CLN.swapaxes(1, 2).reshape(-1, each_CLN.shape[1], *each_TN.shape[2:])
        return each_BL

    return Steps(
        observed_BLI=cut(rollout.observed_TNI),
        begins_BL=cut(begins_TN.astype(np.float32)),
        state={name: np.concatenate([each[name] for each in rollout.states_C]) for name in rollout.states_C[0]},
        actions=cut(rollout.actions_TN),
        logp_BL=cut(rollout.logp_TN),
        values_BL=cut(rollout.values_TN),
        advantages_BL=cut((advantages_TN - advantages_TN.mean()) / (advantages_TN.std() + 1e-8)),
        returns_BL=cut(advantages_TN + rollout.values_TN),
    )
