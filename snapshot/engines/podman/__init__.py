"""Layers under Podman: a folder in which it finds them before it pulls."""
