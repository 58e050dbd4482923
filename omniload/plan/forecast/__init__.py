"""What a run is expected to come to before it starts: shares, epochs, and when stages begin."""
