"""trainer/ring."""
