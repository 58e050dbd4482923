"""Tokens of the units of a source, kept once they are made; see ``cache``."""
