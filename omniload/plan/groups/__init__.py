"""Groups of answers to one prompt: which of them are worth a step, and who trains on which."""
