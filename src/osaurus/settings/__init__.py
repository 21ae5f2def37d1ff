"""What can be set, and where things lie on disk."""
