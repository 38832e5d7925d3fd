"""shared/redis/adapters."""
