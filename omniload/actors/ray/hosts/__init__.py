"""What a plane has on each host: a node of Ray, where it listens, and the heartbeats of the host's roles."""
