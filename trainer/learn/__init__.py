"""trainer/learn."""
