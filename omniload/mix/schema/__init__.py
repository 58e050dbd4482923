"""Further models of the mix file, one part of it a module."""
