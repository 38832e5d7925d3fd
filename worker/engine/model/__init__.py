"""worker/engine/model."""
