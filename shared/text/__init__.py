"""shared/text."""
