"""How a loader continues where it stopped: its progress, the order of an epoch, random states, and the whole state."""
