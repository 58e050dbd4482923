"""Stores behind a client library: calls with deadlines, translated errors, atomic replacement of files."""
