"""Threads, calls with a limit, and the calls that are under way."""
