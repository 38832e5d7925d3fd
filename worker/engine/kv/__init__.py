"""worker/engine/kv."""
