"""What the parts of a mix file ask of each other."""
