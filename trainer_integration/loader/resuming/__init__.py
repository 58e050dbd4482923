"""How a loader goes on where it stopped: its progress, the order of an epoch, random states, the state of all."""
