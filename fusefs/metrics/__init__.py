"""Counters of one view of a store, and their export to Prometheus."""
