"""A run: the launcher, its ranks, their steps, and the log that they leave."""
