"""Images read lazily: layers by random access, merged into one tree, blocks fetched when needed or before."""
