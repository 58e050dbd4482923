"""The mix: the YAML, weights at a step, the order of a source, cursors, and the journal.

Pure functions, except for the journal's file.
"""
