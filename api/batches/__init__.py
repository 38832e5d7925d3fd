"""api/batches."""
