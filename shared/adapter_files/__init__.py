"""shared/adapter_files."""
