"""Sources of single types that take a page of their own, and what several types have in common."""
