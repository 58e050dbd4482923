"""Which source loaders a running plane has: what they do, and which change is due."""
