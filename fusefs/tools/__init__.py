"""Tools that work on a store without a mount: fsck, export, prefetch, statistics."""
