"""Threads, clients in forked processes, calls with a limit, and the calls that are under way."""
