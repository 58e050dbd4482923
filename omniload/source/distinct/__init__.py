"""Records that are not drawn again: those that equal an earlier one, found once and kept, and what others had drawn."""
