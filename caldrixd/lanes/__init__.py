"""The lanes: each runs plans on one kind of hardware."""
