"""Layers merged into one tree, or one layer by itself."""
