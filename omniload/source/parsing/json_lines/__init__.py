"""Lines of JSON: the content of single lines, of many lines at once, and the texts or token ids in them."""
