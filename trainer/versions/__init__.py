"""trainer/versions."""
