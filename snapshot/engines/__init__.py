"""Container engines that start from lazily read images."""
