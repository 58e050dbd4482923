"""What formats share: columns of Arrow, lines, archives, indexes, compressed streams, cuts."""
