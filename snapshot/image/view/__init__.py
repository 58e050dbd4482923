"""A merged image as a file system, and a record of its reads."""
