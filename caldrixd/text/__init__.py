"""From conversations to token ids, and from token ids to text."""
