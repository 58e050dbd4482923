"""The tree of files: what is at a path, which version of it is open, and how another takes its place."""
