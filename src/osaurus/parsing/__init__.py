"""Token ids of a response to events: text, reasoning, tool calls. Imports only types and errors."""
