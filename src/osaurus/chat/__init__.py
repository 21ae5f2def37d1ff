"""Messages to events: prompts, sampling, one code path for streamed and whole answers."""
