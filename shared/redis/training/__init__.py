"""shared/redis/training."""
