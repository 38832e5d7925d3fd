"""shared/process."""
