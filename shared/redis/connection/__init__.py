"""shared/redis/connection."""
