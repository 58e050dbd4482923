"""What a run amounts to: the proof, the summary, the terminal, the page."""
