"""Records that equal an earlier one of their source: found once, kept with the index."""
