"""Stores: where objects and manifests lie, behind one protocol."""
