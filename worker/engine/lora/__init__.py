"""worker/engine/lora."""
