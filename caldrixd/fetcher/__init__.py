"""The child process that fetches models, and the daemon's handle on it."""

WEIGHTS = "model.safetensors"
