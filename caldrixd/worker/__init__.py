"""The worker process, which holds one model, and the daemon's handles on such processes."""
