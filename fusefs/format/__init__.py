"""Files at a path, byte by byte: manifests, layouts, attributes, segments. Arithmetic."""
