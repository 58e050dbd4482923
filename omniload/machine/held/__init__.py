"""What a source loader holds of a source, by position."""
