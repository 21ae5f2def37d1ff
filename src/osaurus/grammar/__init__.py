"""What an answer may say next: JSON Schema, expressions and grammars as masks over tokens.

`vocabulary` knows a model's tokens, `schema` refuses what cannot be enforced, `text` writes
grammars, `matcher` follows one answer. Knows nothing of requests, chats or engines; `llguidance`
does the parsing and is imported by the first request that needs it.
"""
