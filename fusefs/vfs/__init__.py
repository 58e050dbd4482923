"""A store as a file system: inodes, open files and the requests about them. Knows no kernel."""
