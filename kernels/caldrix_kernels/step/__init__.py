"""The interpreter that runs a lowered plan: one call a step, on every thread of the pool."""
