"""The trainer: rollouts become groups, groups a train step, a train step an adapter version that workers load."""
