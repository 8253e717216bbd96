"""Stages of a gated delta net: convolution, recurrence, gated norm."""
