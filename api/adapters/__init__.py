"""api/adapters."""
