"""api/ring."""
