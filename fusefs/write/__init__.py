"""Writing: segments dealt to objects, a spool for random changes, and splices of both."""
