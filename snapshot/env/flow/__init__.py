"""Save and restore, from end to end."""
