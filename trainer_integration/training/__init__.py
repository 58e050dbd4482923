"""A step of training, and its supervision."""
