"""The agreement between caldrix clients and caldrixd. Does no I/O and reads no clock."""
