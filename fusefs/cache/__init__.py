"""Caches: blocks in memory, copies of files on a disk, and an estimate of the kernel's page cache."""
