"""A command in namespaces of its own, with the image as its root."""
