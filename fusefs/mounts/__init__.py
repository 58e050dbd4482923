"""Mounts of a store: one process for each, its supervisor, its options, and fstab."""
