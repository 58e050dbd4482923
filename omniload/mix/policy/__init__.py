"""Policies: what shares sources are to have, by what a run has shown so far."""
