"""Mounts of a store: a process each, its supervisor, its options, and fstab."""
