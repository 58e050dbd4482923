"""Environment snapshots: the changes of an installation, kept once and restored anywhere."""
