r"""An environment of your own: where tasks come from, what follows an answer, and what an episode is worth.

    mlx_parallm_serve --model models/tiny --port 8000
    mlx_parallm_train --connect-to 127.0.0.1:8000 --task examples.own_environment:TwoTurns \
        --task-options '{"first": 20}' --max-turns 2 --adapter two-turns --max-tokens 12 \
        --prompts-per-step 4 --learning-rate 0.001 --steps 20

It keeps no state. `reset(index)` gives the task of that number, the same one each time; `step` gets an observation back
with what the model wrote. Whatever a later turn needs travels in `info`, which must be data that Python can pickle:
the environment runs in a process of its own, and either call may be repeated.
"""

from shared.jobs import Message
from trainer.rollouts.environments import Observation, Outcome


class TwoTurns:
    """Half a point for the sum, half a point for saying it again after a tool has spoken."""

    name = "two-turns"

    def __init__(self, first: int = 10) -> None:
        self._first = first

    async def reset(self, index: int) -> Observation:
        """Task number `index`: one of eight sums."""
        a = self._first + index % 8
        question: Message = {"role": "user", "content": f"What is {a} + 11?"}
        return Observation((question,), info=(0, str(a + 11)))

    async def step(self, observation: Observation, action: str) -> Outcome:
        """Judge one answer. The tool's words follow the first one; they are read by the model, not learned by it."""
        turn, answer = observation.info
        reward = 0.5 * (action.strip() == answer)
        if turn == 0:
            said: Message = {"role": "user", "content": f"The tool says {answer}. What is it?"}
            return Outcome(reward, done=False, messages=(said,), info=(1, answer))
        return Outcome(reward)
