"""The likeliest token of a row of logits."""
