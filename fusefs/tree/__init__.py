"""The tree of files: the file at each path, the version of it that is open, and its replacement by another."""
