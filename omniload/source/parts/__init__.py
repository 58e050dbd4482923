"""Parts of reads: a column of a block, and each reader's share of the units of every block."""
