"""Stages of attention: heads to where attention reads them, attention in blocks, its gate."""
