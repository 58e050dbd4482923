"""Costs that a mix file names, and what costs and strategies read of pieces."""
