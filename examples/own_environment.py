"""An environment as a user writes one: two turns, with a tool's result in between."""

from shared.jobs import Message
from trainer.rollouts.environments import Observation, Outcome


class TwoTurns:
    """Half a point for the sum, half a point for saying it again after a tool has spoken."""

    name = "two-turns"

    def __init__(self, first: int = 10) -> None:
        self._first = first

    async def reset(self, index: int) -> Observation:
        a = self._first + index % 8
        question: Message = {"role": "user", "content": f"What is {a} + 11?"}
        return Observation((question,), info=(0, str(a + 11)))

    async def step(self, observation: Observation, action: str) -> Outcome:
        turn, answer = observation.info
        reward = 0.5 * (action.strip() == answer)
        if turn == 0:
            said: Message = {"role": "user", "content": f"The tool says {answer}. What is it?"}
            return Outcome(reward, done=False, messages=(said,), info=(1, answer))
        return Outcome(reward)
