"""shared/telemetry."""
