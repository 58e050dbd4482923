"""A snapshotter of containerd, whose layers stay in their registry."""
