"""What is drawn: the YAML, weights at a step, the order of a source, cursors, journal. Pure; no I/O but the journal file."""
