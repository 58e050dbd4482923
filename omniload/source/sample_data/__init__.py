"""Data to try a mix with: a corpus of what this machine has installed, and drawn images."""
