"""shared/redis/jobs."""
