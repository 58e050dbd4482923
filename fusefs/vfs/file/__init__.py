"""Open files."""
