"""Stages of every decoder: embedding, norms, matrix products, and the rows that go on."""
