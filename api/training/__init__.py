"""api/training."""
