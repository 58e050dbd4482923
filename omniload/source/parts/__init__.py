"""Parts of what is read: a column of a block, and the share of each of several readers in the units of every block."""
