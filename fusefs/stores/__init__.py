"""Stores of objects and manifests, behind one protocol."""
