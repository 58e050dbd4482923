"""Bytes kept near: blocks in memory, copies of files on a disk, and what the kernel holds."""
