"""Manifests and packs on a store."""
