"""A store as a file system: inodes, open files and their requests. Nothing here depends on a kernel."""
