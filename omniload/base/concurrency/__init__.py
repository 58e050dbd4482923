"""Threads, clients in forked processes, calls with a time limit, and the calls in progress."""
