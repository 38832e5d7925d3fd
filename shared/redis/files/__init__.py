"""shared/redis/files."""
