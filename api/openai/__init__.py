"""OpenAI's endpoints, with vLLM's extras."""
