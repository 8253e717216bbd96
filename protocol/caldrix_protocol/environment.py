"""The environment variables a daemon keeps: what a client starts it with, and what its children inherit.

What decides caches, hub and proxies travels with each request instead.
"""

INHERITED = (
    "HOME",
    "INFERNO_LLD",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHONPATH",
    "ROCM_PATH",
    "TMPDIR",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",
)
