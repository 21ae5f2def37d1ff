"""Readers of call bodies, shared by the formats: each consumes one envelope's text."""
