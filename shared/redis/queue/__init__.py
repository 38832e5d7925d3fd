"""shared/redis/queue."""
