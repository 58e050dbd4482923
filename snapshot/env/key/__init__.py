"""The key of a snapshot: interpreter, base, command, requests."""
