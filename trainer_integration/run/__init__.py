"""A run: the launcher, its ranks, their steps, and their log."""
