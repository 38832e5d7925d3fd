"""shared/rewards."""
