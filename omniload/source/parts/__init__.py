"""One source read by several readers at once, each its share of the units of every block."""
