"""A local LLM inference runtime. The names below are the public ones, each loaded on first use."""

__version__ = "0.1.0"
