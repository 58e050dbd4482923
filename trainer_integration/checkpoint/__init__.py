"""Checkpoints: whole or absent, checked on read, free of pickle; in a folder, or on a striped namespace."""
