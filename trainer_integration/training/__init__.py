"""A step of training, and what watches over it."""
