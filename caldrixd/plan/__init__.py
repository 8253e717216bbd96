"""Which ops run, in which order, on which buffers: plain data that every lane reads."""
