"""Entry points in the middle of compressed shards: found once, kept, and verified at each read."""
