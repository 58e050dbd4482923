"""Images read lazily: layers with random access, merged into one tree, blocks fetched on demand or in advance."""
