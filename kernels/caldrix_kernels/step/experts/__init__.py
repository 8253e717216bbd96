"""Stages of a mixture of experts: which rows go where, and what comes back."""
