"""api/jobs."""
