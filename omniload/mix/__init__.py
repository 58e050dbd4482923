"""What is drawn: the YAML, weights at a step, order of a source, cursors, journal.

Pure, but for the journal's file.
"""
