"""What one layer remembers between steps, one kind a file; the memory's owner is `cache/`."""
