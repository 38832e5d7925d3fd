"""trainer/rollouts."""
