"""Planes that outlive the driver which opened them."""
