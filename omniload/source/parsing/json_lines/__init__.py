"""Lines of JSON: what one of them holds, many of them at once, and the texts or token ids that they are read for."""
