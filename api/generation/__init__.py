"""api/generation."""
