"""Compressed streams that are entered in their middle."""
