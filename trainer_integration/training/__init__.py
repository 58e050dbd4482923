"""A step of training, and what watches over it. Knows of no process but through its groups."""
