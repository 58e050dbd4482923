"""The local runtime: the roles as threads of one process. No Ray."""
