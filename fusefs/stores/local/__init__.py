"""A store in a local directory: paths that no link can lead out of it, and the durability of names."""
