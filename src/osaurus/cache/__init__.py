"""Whose memory the KV state is, and when it may be used again."""
