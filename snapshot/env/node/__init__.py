"""Trees of a node: extracted, locked, mounted, verified, pruned."""
