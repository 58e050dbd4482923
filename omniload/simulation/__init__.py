"""The data plane under a virtual clock: its real machines, with costs from a short profile of this machine."""
