"""A merged image as a file system, and what is read of it."""
