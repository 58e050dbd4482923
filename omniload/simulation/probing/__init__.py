"""Measuring what messages cost: threads of this process, or the processes of a small plane on Ray."""
