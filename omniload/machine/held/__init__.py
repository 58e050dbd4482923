"""The samples that a source loader holds, by position."""
