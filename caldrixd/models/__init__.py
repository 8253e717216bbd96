"""Which model a name means, whether its files are acceptable, and its weights in memory."""
