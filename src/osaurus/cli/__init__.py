"""The terminal: one verb a file, imported only when that verb runs."""
