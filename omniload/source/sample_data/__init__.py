"""Data to try a mix with: a corpus from texts of this machine's Python installation, and drawn images."""
