"""shared/redis/ring."""
