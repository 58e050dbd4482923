"""The verb of `omniload mix` that runs a data plane under a virtual clock, and what it prints."""
