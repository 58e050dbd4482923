"""Measures Ray's cost on a machine: small planes, calls between bare actors, processor time and memory of processes."""
