"""HTTP: bytes to `ChatRequest`s and events to frames. Decides nothing about models or text."""
