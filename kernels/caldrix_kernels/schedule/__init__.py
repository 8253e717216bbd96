"""How the threads of a step share its work: items, claims, waiting, and the pool's life."""
