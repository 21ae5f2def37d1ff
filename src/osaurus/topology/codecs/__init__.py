"""How a full block of keys and values is kept in fewer bytes, one codec a file."""
