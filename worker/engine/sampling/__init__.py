"""worker/engine/sampling."""
