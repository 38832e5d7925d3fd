"""shared/redis/tokens."""
