"""Nodes that give each other blocks."""
