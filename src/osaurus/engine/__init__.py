"""One model, many requests. Token ids in, events out; no text, no HTTP, no asyncio inside."""
