"""Which sequences step next, and what follows from a step: token ids only, no text."""
