"""A rank's side of a plane: its link to batches and planner, and joining from a process that did not open the plane."""
