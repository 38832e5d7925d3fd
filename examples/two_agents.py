r"""Two policies that learn together over one base: each answers, asks the other one the same, and is paid for agreeing.

    mlx_parallm_serve --model models/tiny --port 8000
    mlx_parallm_train --connect-to 127.0.0.1:8000 --agents examples/two_agents.toml

An environment asks another policy of the ring by a `question`: it goes through the queue like all that is sampled, and
its answer comes as the action of the next `step`. What the environment has to remember until then travels in `info`.
"""

from shared.jobs import Message
from trainer.rollouts.environments import Observation, Outcome, Question


class SameSum:
    """Half a point for the sum, half a point when the partner says the same."""

    name = "same-sum"

    def __init__(self, partner: str) -> None:
        self._partner = partner

    async def reset(self, index: int) -> Observation:
        """Task number `index`: one of sixteen sums."""
        a, b = 10 + index % 4, 11 + index // 4 % 4
        question: Message = {"role": "user", "content": f"{a}+{b}="}
        return Observation((question,), info=(str(a + b), None))

    async def step(self, observation: Observation, action: str) -> Outcome:
        """Judge the policy's own answer and ask the partner; then compare the two."""
        answer, mine = observation.info
        if mine is None:
            right = float(action == answer)
            assert not isinstance(observation.prompt, str)
            ask = Question(self._partner, observation.prompt, max_tokens=5)
            return Outcome(0.5 * right, info=(answer, action), components={"right": right}, question=ask)
        same = float(action == mine)
        return Outcome(0.5 * same, components={"same": same})
