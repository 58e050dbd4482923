"""Results of a run: the proof, the summary, the terminal output, the page."""
