"""What a file system is to a binding, and what a handler may wait for."""
