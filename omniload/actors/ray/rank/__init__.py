"""What a rank holds of a plane: its way to batches, and how it joins from a process that did not open the plane."""
