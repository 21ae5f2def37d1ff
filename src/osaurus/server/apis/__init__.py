"""One protocol a file; each only translates between its wire form and `chat/`."""
