"""The base of every package: errors, configuration, units, state, clock, retry, log, metrics, command line.

Nothing here imports ray, torch or FUSE.
"""
