"""Signals for the numbers of loaders and readers: measurements, and the coming draws of the mix."""
