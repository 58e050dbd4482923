"""What amounts and weights of one mix come to, of the total of a run."""
