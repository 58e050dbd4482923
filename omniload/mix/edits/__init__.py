"""Changes of a mix while it is trained on: what one says, what holds at a step, and the file that keeps them."""
