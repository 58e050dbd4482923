"""Saving and restoring, from end to end."""
