"""What a train step reports: plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Distances:
    """Absolute differences of log-probabilities, and k3 estimates of KL, over the tokens that could be told apart."""

    tokens: int
    mismatch_mean: float
    mismatch_max: float
    mismatch_kl: float  # of mu from v
    staleness_mean: float
    staleness_max: float
    staleness_kl: float  # of v from theta


@dataclass(frozen=True)
class StepReport:
    """What a train step did."""

    updated: bool
    loss: float = 0.0
    learning_rate: float = 0.0
    grad_norm: float = 0.0
    update_rms: float = 0.0  # root mean square of the change of the adapter's parameters
    entropy: float = 0.0
    clip_fraction: float = 0.0
    kl: float = 0.0  # k3 against the base; 0 when beta is 0
    tokens: int = 0
    sequences: int = 0
    seconds: float = 0.0
    distances: Distances | None = None
    nonfinite_gradients: int = 0  # minibatches whose update was left out
