"""Layers for Podman: a folder in which it finds layers before it pulls."""
