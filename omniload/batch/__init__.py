"""How a microbatch is made: rows from pieces, labels, positions, slices for context parallelism, digests. Pure."""
