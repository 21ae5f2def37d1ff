"""Values that every room speaks: frozen, without torch, without I/O."""
