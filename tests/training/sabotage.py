"""Environments that turn against a run, for `--task tests.training.sabotage:Inverting`."""

from trainer.rollouts.environments import ArithmeticEnvironment, Observation, Outcome


class Inverting(ArithmeticEnvironment):
    """Pays for right answers at first; from the sample number `after` on it takes 5 for each, right or wrong."""

    name = "inverting"

    def __init__(self, after: int, count: int = 8) -> None:
        super().__init__(seed=0, count=count)
        self._after = after
        self._seen = 0

    async def step(self, observation: Observation, action: str) -> Outcome:
        """The reward of the moment."""
        outcome = await super().step(observation, action)
        assert outcome.reward is not None
        self._seen += 1
        return Outcome(outcome.reward if self._seen <= self._after else outcome.reward - 5.0)
