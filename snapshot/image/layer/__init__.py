"""From a layer of any format to an index of its files and blocks."""
