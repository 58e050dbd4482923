"""Source loaders of a running plane: how they are added, how sources move between them, and how they retire."""
