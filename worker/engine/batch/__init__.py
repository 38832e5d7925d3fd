"""worker/engine/batch."""
