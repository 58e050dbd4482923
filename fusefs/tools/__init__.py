"""What works on a store without a mount: fsck, export, prefetch, statistics."""
