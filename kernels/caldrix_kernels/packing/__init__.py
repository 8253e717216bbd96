"""Turns rows of a stored matrix into the panels that the tiles of linear read."""
