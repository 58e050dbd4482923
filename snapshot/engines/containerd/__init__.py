"""A snapshotter of containerd: layers that stay in their registry."""
