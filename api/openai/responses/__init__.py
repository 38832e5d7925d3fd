"""api/openai/responses."""
