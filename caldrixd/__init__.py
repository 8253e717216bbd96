"""The daemon: owns the socket, the workers and the downloads."""
