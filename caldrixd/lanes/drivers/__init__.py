"""Everything that loads a native library or starts a process for a lane."""
