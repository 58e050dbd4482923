"""The data plane under a virtual clock: its own machines, over what a short profile measured of this machine."""
