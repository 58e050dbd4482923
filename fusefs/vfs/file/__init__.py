"""Files that are open."""
