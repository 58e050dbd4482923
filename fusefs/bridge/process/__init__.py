"""A mount's process: started, tuned, handed over, unmounted."""
