"""One module for each command: `execute` does it and returns the exit status, or raises Refused."""
