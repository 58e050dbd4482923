"""Requests of the kernel: one class for each kind."""
