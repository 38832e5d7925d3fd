"""api/serve."""
