"""The parts of a plane on each host: a node of Ray, its listening address, and the heartbeats of the host's roles."""
