"""Images of a step, dealt to ranks apart from the rows that hold them."""
