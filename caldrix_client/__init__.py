"""The client: it owns the terminal, the files the user names and the conversation."""
