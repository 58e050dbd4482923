"""What an error of Ray says about the actor that was called."""
