"""Tokens of the units of a source, kept once they were made; see ``cache``."""
