"""What a training loop takes: packed rows as tensors, and the batch of a step."""
