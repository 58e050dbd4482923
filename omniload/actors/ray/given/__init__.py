"""A Ray that somebody else started."""
